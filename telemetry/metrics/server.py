"""HTTP server of `/metrics` with limits on connections and their duration."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics.instruments import exposition

MAX_CONNECTIONS = 16
SILENCE_S = 5.0  # timeout of a connection
ACCEPT_RETRY_S = 0.1


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
