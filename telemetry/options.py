"""Options of tracing and metrics, as parsed from the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import TELEMETRY, Option, check_options
from baton.core.units import parse_bytes
from baton.core.user_cache import user_cache_folder

MIB = 1 << 20
TRACE_DIR_VARIABLE = "BATON_TRACE_DIR"
NOWHERE = ("off", "none")


def default_trace_dir() -> Path:
    """Return the default folder of the trace store."""
    folder = user_cache_folder()
    if folder is None:
        return Path(gettempdir()) / f"baton-traces-{os.getuid()}"
    return folder / "traces"


def trace_folder(text: str) -> Path | None:
    """Return the trace folder, or None for `none` and `off`; `./none` names such a folder."""
    if text.strip().lower() in NOWHERE:
        return None
    return Path(text).expanduser() if text else default_trace_dir()


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """By default nothing is traced: set `trace_dir` or `otlp_endpoint`."""

    trace_ratio: Annotated[
        float,
        Option(
            "Share of requests to trace, from 0 to 1; the sampling flag of a caller's "
            "traceparent takes precedence.",
            TELEMETRY,
            at_least=0,
            at_most=1,
            is_setting=True,
        ),
    ] = 1.0
    trace_dir: Annotated[
        Path | None,
        Option(
            "Folder of stored traces, read by `baton trace`; none or off stores none. Default: in "
            "the user's cache folder.",
            TELEMETRY,
            default="",
            parse=trace_folder,
            variable=TRACE_DIR_VARIABLE,
        ),
    ] = None
    trace_dir_bytes: Annotated[  # of the whole folder, for all its processes
        int,
        Option(
            "Maximum size of the trace folder; the oldest traces are deleted.",
            TELEMETRY,
            name="trace_limit",
            default="64MiB",
            parse=parse_bytes,
            is_setting=True,
        ),
    ] = 64 * MIB
    otlp_endpoint: Annotated[
        str,
        Option(
            "OTLP/gRPC endpoint of a collector for traces and metrics, such as "
            "http://127.0.0.1:4317.",
            TELEMETRY,
            variable="OTEL_EXPORTER_OTLP_ENDPOINT",
        ),
    ] = ""
    metrics_port: Annotated[
        int | None,
        Option(
            "Port of the Prometheus endpoint /metrics; 0 takes a free port and logs it. Default: "
            "no endpoint.",
            TELEMETRY,
            at_least=0,
            at_most=65535,
        ),
    ] = None
    metrics_host: Annotated[
        str, Option("Address to serve metrics on; access is not authenticated.", TELEMETRY)
    ] = "127.0.0.1"
    otlp_metrics_every_s: Annotated[
        float,
        Option(
            "Seconds between exports of metrics to the OTLP collector; 0: never.",
            TELEMETRY,
            at_least=0,
            is_setting=True,
        ),
    ] = 15.0

    def __post_init__(self) -> None:
        check_options(self)
        if self.trace_dir_bytes < MIB:
            raise InvalidConfig("the limit of the trace folder is below 1 MiB; raise trace-limit")

    @property
    def sends_metrics(self) -> bool:
        return bool(self.otlp_endpoint) and self.otlp_metrics_every_s > 0

    @property
    def counts(self) -> bool:
        """True if metrics are served or exported, so that they must be counted."""
        return self.metrics_port is not None or self.sends_metrics

    @property
    def is_on(self) -> bool:
        return self.trace_dir is not None or bool(self.otlp_endpoint)
