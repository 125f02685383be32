"""Metric readers of a process: a Prometheus endpoint and an OTLP exporter."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry

from baton.core.errors import InvalidConfig
from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import Read, Reading, ScrapeCollector, exposition
from baton.telemetry.options import TelemetryOptions
from baton.telemetry.resource import Process
from baton.telemetry.tracing.outlet import ExportFailed

if TYPE_CHECKING:
    from baton.telemetry.metrics.otlp import OtlpMetrics

WARNING_INTERVAL_S = 60.0
MAX_CLOSE_S = 6.0
MAX_CONNECTIONS = 16  # of the endpoint
SILENCE_S = 5.0  # timeout of a connection
ACCEPT_RETRY_S = 0.1

log = logging.getLogger(__name__)
LONGEST_WAIT_S = 1.0

Post = Callable[[Callable[[], None]], object]


KnownReading = tuple[Reading, float]  # and its time


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


def metrics_server(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Return a listening server that does not serve yet. Raises OSError."""
    server = MetricsServer((host, port), MetricsRequestHandler)
    server.set_app(partial(_answer, registry))
    return server


def _answer(
    registry: CollectorRegistry, environ: dict[str, Any], start_response: Any
) -> list[bytes]:
    body, content_type = exposition(registry, environ.get("HTTP_ACCEPT", ""))
    start_response("200 OK", [("Content-Type", content_type)])
    return [body]


class MetricsRequestHandler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Server with a thread per connection. Connections beyond the limit are closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[MetricsRequestHandler]) -> None:
        [address_info, *_] = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self.address_family = address_info[0]
        self._free_slots = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_RETRY_S)  # out of descriptors: the socket stays readable
            raise

    def verify_request(self, *_: Any) -> bool:
        return self._free_slots.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_slots.release()

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that time out or disconnect."""


class OwnerThreadReader:
    """Reads on the owner's thread. If that thread is busy, returns the last reading."""

    def __init__(self, post: Post, read: Read, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._post = post
        self._read = read
        self._longest_wait_s = longest_wait_s
        self._pending: Future[KnownReading] = Future()
        self._pending.set_result(({}, 0.0))
        self._known: KnownReading | None = None

    def __call__(self) -> Reading:
        """Return a reading. Callable from any thread. Empty if there is no reading yet."""
        pending = self._pending
        if pending.done():  # else the last request is still queued at the owner
            pending = self._pending = Future()
            self._post(partial(self._answer, pending))
        try:
            reading, _ = pending.result(self._longest_wait_s)
            return {**reading, counted.READINGS_AGE: 0.0}
        except TimeoutError:
            known = self._known
        if known is None:
            return {}
        reading, at_s = known
        return {**reading, counted.READINGS_AGE: time.monotonic() - at_s}

    def _answer(self, pending: Future[KnownReading]) -> None:
        self._known = self._read(), time.monotonic()
        pending.set_result(self._known)
