"""Tracing and metrics options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.telemetry.options import TelemetryOptions, default_trace_dir
from baton.units import parse_bytes

TRACING_PANEL = "Telemetry"
TRACE_DIR_VARIABLE = "BATON_TRACE_DIR"
NOWHERE = ("off", "none")

TraceRatio = Annotated[
    float,
    typer.Option(
        help="Share of requests to trace, from 0 to 1; the sampling flag of a caller's "
        "traceparent takes precedence.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceStepRatio = Annotated[
    float,
    typer.Option(
        help="Share of engine steps to trace, from 0 to 1. Each is a trace of its own, linked to "
        "those of the requests in the step.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceDir = Annotated[
    str,
    typer.Option(
        envvar=TRACE_DIR_VARIABLE,
        help="Folder of stored traces, read by `baton trace`; none or off stores none. Default: in "
        "the user's cache folder.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceLimit = Annotated[
    str,
    typer.Option(
        help="Maximum size of the trace folder; the oldest traces are deleted.",
        rich_help_panel=TRACING_PANEL,
    ),
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
        help="OTLP/gRPC endpoint of a collector for traces and metrics, such as "
        "http://127.0.0.1:4317.",
        rich_help_panel=TRACING_PANEL,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the Prometheus endpoint /metrics; 0 takes a free port and logs it. Default: "
        "no endpoint.",
        rich_help_panel=TRACING_PANEL,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        help="Address to serve metrics on; access is not authenticated.",
        rich_help_panel=TRACING_PANEL,
    ),
]
OtlpMetricsEvery = Annotated[
    float,
    typer.Option(
        help="Seconds between exports of metrics to the OTLP collector; 0: never.",
        rich_help_panel=TRACING_PANEL,
    ),
]


def telemetry_options(
    trace_ratio: TraceRatio = 1.0,
    trace_dir: TraceDir = "",
    trace_limit: TraceLimit = "64MiB",
    otlp_endpoint: OtlpEndpoint = "",
    metrics_port: MetricsPort = None,
    metrics_host: MetricsHost = "127.0.0.1",
    otlp_metrics_every_s: OtlpMetricsEvery = 15.0,
) -> TelemetryOptions:
    """Telemetry options of every process of a cluster."""
    return TelemetryOptions(
        trace_ratio=trace_ratio,
        trace_dir=trace_folder(trace_dir),
        trace_dir_bytes=parse_bytes(trace_limit),
        otlp_endpoint=otlp_endpoint,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        otlp_metrics_every_s=otlp_metrics_every_s,
    )


def trace_folder(text: str) -> Path | None:
    """Return the trace folder, or None for `none` and `off`; `./none` names such a folder."""
    if text.strip().lower() in NOWHERE:
        return None
    return Path(text).expanduser() if text else default_trace_dir()
