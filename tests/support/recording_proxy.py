"""TCP proxy that records the first bytes of each connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer

CHUNK_BYTES = 1 << 16


@contextmanager
def a_recording_proxy(target: str) -> Iterator[tuple[str, list[bytes]]]:
    """Yield the proxy's address, and what clients have sent first."""
    host, _, port = target.rpartition(":")
    heads: list[bytes] = []

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            head = self.request.recv(CHUNK_BYTES)
            heads.append(head)
            with socket.create_connection((host, int(port))) as server:
                server.sendall(head)
                back = threading.Thread(target=_copy, args=(server, self.request))
                back.start()
                _copy(self.request, server)
                back.join()

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as proxy:
        serving = threading.Thread(target=proxy.serve_forever)
        serving.start()
        try:
            yield f"127.0.0.1:{proxy.server_address[1]}", heads
        finally:
            proxy.shutdown()
            serving.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
