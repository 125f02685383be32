"""The HTTP server of `/metrics`: few connections, none of them for long."""

from __future__ import annotations

import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

MAX_CONNECTIONS = 16
SILENCE_S = 5.0  # of a client that has connected
ACCEPT_RETRY_S = 0.1


def metrics_server(registry: CollectorRegistry, host: str, port: int) -> WSGIServer:
    """Listens, and does not serve yet. Raises OSError."""
    server = MetricsServer((host, port), MetricsRequestHandler)
    server.set_app(make_wsgi_app(registry))
    return server


class MetricsRequestHandler(WSGIRequestHandler):
    timeout = SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are not logged."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, up to a limit; the ones beyond it are closed at once."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[MetricsRequestHandler]) -> None:
        [found, *_] = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self.address_family = found[0]
        self._places = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_RETRY_S)  # the socket stays readable: no descriptor is left
            raise

    def verify_request(self, *_: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, *_: Any) -> None:
        """A client that is silent or leaves is its own affair."""
