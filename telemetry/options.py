"""Options of tracing and metrics, as parsed from the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from baton.core.errors import InvalidConfig

MIB = 1 << 20


def default_trace_dir() -> Path:
    """Return the default folder of the trace store."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    if cache_home:
        return Path(cache_home) / "baton" / "traces"
    try:
        return Path.home() / ".cache" / "baton" / "traces"
    except RuntimeError:  # a user without a home, as in some containers
        return Path(gettempdir()) / f"baton-traces-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class TelemetryOptions:
    """By default nothing is traced: set `trace_dir` or `otlp_endpoint`."""

    # Sampling ratio of requests without a traceparent; with one, its sampled flag decides.
    trace_ratio: float = 1.0
    trace_dir: Path | None = None
    trace_dir_bytes: int = 64 * MIB  # limit of the whole folder, for all its processes
    otlp_endpoint: str = ""  # such as http://127.0.0.1:4317
    metrics_port: int | None = None  # 0 takes any free port; None serves no metrics
    metrics_host: str = "127.0.0.1"
    otlp_metrics_every_s: float = 15.0  # 0 sends no metrics to the endpoint

    def __post_init__(self) -> None:
        if not 0 <= self.trace_ratio <= 1:
            raise InvalidConfig(f"--trace-ratio is {self.trace_ratio}; choose one from 0 to 1")
        if self.trace_dir_bytes < MIB:
            raise InvalidConfig("the trace folder's limit is below 1 MiB; give it more")

        if self.otlp_metrics_every_s < 0:
            raise InvalidConfig(
                f"--otlp-metrics-every-s {self.otlp_metrics_every_s} is below 0; 0 disables it"
            )

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
