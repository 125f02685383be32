"""Server of images over HTTP and HTTPS, which can also be slow, endless or lead elsewhere."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Semaphore, Thread

PIECE = bytes(1 << 16)


@dataclass(slots=True)
class ImageServer:
    """Serves files by name, and the pages that `_Page` has methods for."""

    files: Mapping[str, bytes]
    port: int = 0
    scheme: str = "http"
    seen: list[tuple[str, str]] = field(default_factory=list)  # host and path of each request
    arrived: Semaphore = field(default_factory=lambda: Semaphore(0))  # released by each request
    has_ended: Event = field(default_factory=Event)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}/{path}"


class _Page(BaseHTTPRequestHandler):
    pages: ImageServer

    def do_GET(self) -> None:
        self.pages.seen.append((self.headers["host"], self.path))
        self.pages.arrived.release()
        name, _, target = self.path[1:].partition("?")
        with suppress(ConnectionError, ssl.SSLError):
            if name in self.pages.files:
                self._send_file(self.pages.files[name])
            else:
                getattr(self, f"_send_{name}", self._send_missing)(target)

    def _send_file(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_redirect(self, target: str) -> None:
        self.send_response(302)
        self.send_header("location", target)
        self.end_headers()

    def _send_loop(self, _target: str) -> None:
        self._send_redirect("/loop")

    def _send_announced(self, target: str) -> None:
        """Announce `target` bytes, and send none."""
        self.send_response(200)
        self.send_header("content-length", target)
        self.end_headers()

    def _send_endless(self, _target: str) -> None:
        """Send bytes, whose number is not announced, until the client closes the connection."""
        self.send_response(200)
        self.end_headers()
        while not self.pages.has_ended.is_set():
            self.wfile.write(PIECE)

    def _send_slowly(self, _target: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.flush()
        self.pages.has_ended.wait()

    def _send_missing(self, _target: str) -> None:
        self.send_error(404)

    def log_message(self, *_arguments: object) -> None:
        """Write nothing to stderr."""


@contextmanager
def an_image_server(
    files: Mapping[str, bytes], certificate: tuple[Path, Path] | None = None
) -> Iterator[ImageServer]:
    """Serve files on the loopback address, over TLS with a certificate and its key."""
    pages = ImageServer(files)
    handler = type("Page", (_Page,), {"pages": pages})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    pages.port = server.server_port
    if certificate is not None:
        pages.scheme = "https"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    serving.start()
    try:
        yield pages
    finally:
        pages.has_ended.set()
        server.shutdown()
        serving.join()
        server.server_close()
