"""Metric readers of a process: a Prometheus endpoint and an OTLP exporter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from baton.core.errors import InvalidConfig
from baton.telemetry.metrics.instruments import Read, ScrapeCollector
from baton.telemetry.metrics.server import metrics_server
from baton.telemetry.options import TelemetryOptions
from baton.telemetry.resource import Process
from baton.telemetry.tracing.outlet import ExportFailed

if TYPE_CHECKING:
    from baton.telemetry.metrics.otlp import OtlpMetrics

WARNING_INTERVAL_S = 60.0
MAX_CLOSE_S = 6.0

log = logging.getLogger(__name__)


@contextmanager
def export_metrics(
    options: TelemetryOptions, process: Process, registry: CollectorRegistry, read: Read
) -> Iterator[None]:
    """Serve and export metrics within the block. Raises InvalidConfig if binding fails."""
    registry.register(ScrapeCollector(read))
    with ExitStack() as lifetime:
        if options.metrics_port is not None:
            serving = _serving(registry, options.metrics_host, options.metrics_port)
            log.info("metrics on %s", lifetime.enter_context(serving))
        if options.sends_metrics:
            lifetime.enter_context(_sending(options, process, registry))
        yield


@contextmanager
def _serving(registry: CollectorRegistry, host: str, port: int) -> Iterator[str]:
    address = host.strip("[]")
    try:
        server = metrics_server(registry, address, port)
    except OSError as error:
        raise InvalidConfig(
            f"cannot serve metrics on {host}:{port} ({error}); choose another --metrics-port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics-server", daemon=True)
    thread.start()
    try:
        url_host = f"[{address}]" if ":" in address else address
        yield f"http://{url_host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _sending(
    options: TelemetryOptions, process: Process, registry: CollectorRegistry
) -> Iterator[None]:
    """Export at an interval, and once more at the end of the block."""
    # Imported lazily, as for traces.
    from baton.telemetry.metrics.otlp import OtlpMetrics

    exporter = OtlpMetrics(options.otlp_endpoint, registry, process.attributes)
    is_closing = threading.Event()
    thread = threading.Thread(
        target=_send_until,
        args=(is_closing, options.otlp_metrics_every_s, exporter),
        name="metrics",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        is_closing.set()
        thread.join(MAX_CLOSE_S)
        exporter.close()


def _send_until(is_closing: threading.Event, every_s: float, exporter: OtlpMetrics) -> None:
    warned_s: float | None = None
    is_last = False
    while not is_last:
        is_last = is_closing.wait(every_s)
        try:
            exporter.send()
        except ExportFailed as failure:
            now = time.monotonic()
            if warned_s is None or now - warned_s >= WARNING_INTERVAL_S:
                warned_s = now
                log.warning("metrics could not be exported: %s", failure)
