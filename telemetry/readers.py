"""Who reads a process's metrics: Prometheus over HTTP, and an OTLP collector."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from engine.errors import InvalidConfig
from telemetry.metrics import Read, Readings
from telemetry.metrics_server import metrics_server
from telemetry.options import TelemetryOptions
from telemetry.outlet import ExportFailed
from telemetry.resource import Process

if TYPE_CHECKING:
    from telemetry.otlp_metrics import OtlpMetrics

TOLD_EVERY_S = 60.0
LONGEST_END_S = 6.0

log = logging.getLogger(__name__)


@contextmanager
def metrics_read(
    options: TelemetryOptions, process: Process, registry: CollectorRegistry, read: Read
) -> Iterator[None]:
    """From here to the end of the block. Raises InvalidConfig when the port cannot be had."""
    registry.register(Readings(read))
    with ExitStack() as lifetime:
        if options.metrics_port is not None:
            serving = _serving(registry, options.metrics_host, options.metrics_port)
            log.info("metrics on %s", lifetime.enter_context(serving))
        if options.sends_metrics:
            lifetime.enter_context(_sending(options, process, registry))
        yield


@contextmanager
def _serving(registry: CollectorRegistry, host: str, port: int) -> Iterator[str]:
    bare = host.strip("[]")
    try:
        server = metrics_server(registry, bare, port)
    except OSError as error:
        raise InvalidConfig(
            f"cannot serve metrics on {host}:{port} ({error}); choose another --metrics-port"
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics-server", daemon=True)
    thread.start()
    try:
        shown = f"[{bare}]" if ":" in bare else bare
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def _sending(
    options: TelemetryOptions, process: Process, registry: CollectorRegistry
) -> Iterator[None]:
    """Again and again, and once more at the end."""
    # Loaded late, as for traces.
    from telemetry.otlp_metrics import OtlpMetrics

    outlet = OtlpMetrics(options.otlp_endpoint, registry, process.attributes)
    is_over = threading.Event()
    thread = threading.Thread(
        target=_send_until,
        args=(is_over, options.otlp_metrics_every_s, outlet),
        name="metrics",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(LONGEST_END_S)
        outlet.close()


def _send_until(is_over: threading.Event, every_s: float, outlet: OtlpMetrics) -> None:
    told_s = float("-inf")
    is_last = False
    while not is_last:
        is_last = is_over.wait(every_s)
        try:
            outlet.send()
        except ExportFailed as failure:
            if time.monotonic() - told_s >= TOLD_EVERY_S:
                told_s = time.monotonic()
                log.warning("metrics do not get through: %s", failure)
