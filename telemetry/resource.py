"""OpenTelemetry resource attributes of a process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from baton.telemetry import names
from baton.telemetry.tracing.spans import AttributeValue


@dataclass(frozen=True, slots=True)
class Process:
    role: str  # router, prefill or decode
    node_id: str
    incarnation: str

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        return {
            names.SERVICE_NAME: f"baton-{self.role}",
            names.SERVICE_VERSION: _version(),
            names.SERVICE_INSTANCE: f"{self.node_id}/{self.incarnation}",
            names.ROLE: self.role,
            names.NODE: self.node_id,
            names.INCARNATION: self.incarnation,
            names.PROCESS_ID: os.getpid(),
        }


def _version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"
