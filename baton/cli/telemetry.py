"""Options that say what is traced and counted, and where traces and metrics go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from baton.units import parse_bytes
from telemetry.options import TelemetryOptions, default_trace_dir

TRACING_PANEL = "Telemetry"
TRACE_DIR_VARIABLE = "BATON_TRACE_DIR"
NOWHERE = ("off", "none")

TraceRatio = Annotated[
    float,
    typer.Option(
        help="Share of the requests that are traced, from 0 to 1; a caller's traceparent goes "
        "before it.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceStepRatio = Annotated[
    float,
    typer.Option(
        help="Share of the engine's steps that get a trace of their own, linked to those of the "
        "requests in the step, from 0 to 1; 0 is none.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceDir = Annotated[
    str,
    typer.Option(
        envvar=TRACE_DIR_VARIABLE,
        help="Folder that traces are kept in, for `baton trace`; the user's cache if left out, "
        "none or off keeps none.",
        rich_help_panel=TRACING_PANEL,
    ),
]
TraceLimit = Annotated[
    str,
    typer.Option(
        help="Most that the folder may hold; the oldest traces make room.",
        rich_help_panel=TRACING_PANEL,
    ),
]
OtlpEndpoint = Annotated[
    str,
    typer.Option(
        envvar="OTEL_EXPORTER_OTLP_ENDPOINT",
        help="Collector to send traces and metrics to by OTLP over gRPC, such as "
        "http://127.0.0.1:4317.",
        rich_help_panel=TRACING_PANEL,
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of this process's metrics for Prometheus, at /metrics; 0 takes any that is "
        "free and logs it, none are served if left out.",
        rich_help_panel=TRACING_PANEL,
    ),
]
MetricsHost = Annotated[
    str,
    typer.Option(
        help="Address to serve metrics on; whoever reaches it can read them.",
        rich_help_panel=TRACING_PANEL,
    ),
]
OtlpMetricsEvery = Annotated[
    float,
    typer.Option(
        help="Seconds between two times that metrics go to the OTLP collector; 0 is never.",
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
    """Every process of a cluster takes these."""
    return TelemetryOptions(
        trace_ratio=trace_ratio,
        trace_dir=trace_folder(trace_dir),
        trace_dir_bytes=parse_bytes(trace_limit),
        otlp_endpoint=otlp_endpoint,
        metrics_port=metrics_port,
        metrics_host=metrics_host,
        otlp_metrics_every_s=otlp_metrics_every_s,
    )


def trace_folder(written: str) -> Path | None:
    """None: no traces are kept. A folder of such a name is written as ./none."""
    if written.strip().lower() in NOWHERE:
        return None
    return Path(written).expanduser() if written else default_trace_dir()
