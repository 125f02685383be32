"""What a person may choose of tracing. The command line is read once, into this."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import InvalidConfig

MIB = 1 << 20


def default_trace_dir() -> Path:
    """Where traces lie if nobody says otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "baton" / "traces"


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """As it stands, nothing is traced: `trace_dir` or `otlp_endpoint` says where traces go."""

    # Of the requests that come without a traceparent; one that comes with it decides itself.
    trace_ratio: float = 1.0
    trace_dir: Path | None = None
    trace_dir_bytes: int = 64 * MIB  # of all processes that write there
    otlp_endpoint: str = ""  # such as http://127.0.0.1:4317
    metrics_port: int | None = None  # 0 takes any that is free; None: no metrics are served

    def __post_init__(self) -> None:
        if not 0 <= self.trace_ratio <= 1:
            raise InvalidConfig(f"--trace-ratio is {self.trace_ratio}; choose one from 0 to 1")
        if self.trace_dir_bytes < MIB:
            raise InvalidConfig("the trace folder's limit is below 1 MiB; give it more")

    @property
    def is_on(self) -> bool:
        return self.trace_dir is not None or bool(self.otlp_endpoint)
