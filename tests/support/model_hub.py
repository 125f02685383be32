"""A model hub on loopback: the part of the Hugging Face API that downloads use."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = "/api/models/"
RANGE = re.compile(r"bytes=(\d+)-")


class ModelHub:
    """Serves one repository. A download of `held` stops at its half until the client is gone."""

    def __init__(self, repository: str, files: Mapping[str, bytes]) -> None:
        self.repository = repository
        self.files = dict(files)
        self.held = ""
        self.is_held = threading.Event()
        self.downloads: list[tuple[str, int]] = []  # names, and from which byte
        self._released = threading.Event()
        handler = type("_BoundHandler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def hold(self) -> None:
        """Keep a client waiting, until `release`."""
        self.is_held.set()
        self._released.wait()

    def release(self) -> None:
        self.held = ""
        self._released.set()

    def __enter__(self) -> ModelHub:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class ClosingServer:
    """Closes each connection as soon as it is made."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_connections = 0
        self._thread = threading.Thread(target=self._accept)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):  # closed before
            self._listening.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._thread.join()
        self._listening.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._listening.accept()[0].close()
                self.num_connections += 1


class _Handler(BaseHTTPRequestHandler):
    hub: ModelHub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, is_head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"{API}{self.hub.repository}"):
            self._send_json(self._description(path))
        elif path.startswith(f"/{self.hub.repository}/resolve/"):
            name = path.split("/resolve/")[1].split("/", 1)[1]
            self._send_file(name, self.hub.files[name], is_head=is_head)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _description(self, path: str) -> object:
        if "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
                for name, content in self.hub.files.items()
            ]
        siblings = [{"rfilename": name} for name in self.hub.files]
        return {"id": self.hub.repository, "sha": COMMIT, "siblings": siblings}

    def _send_json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_file(self, name: str, content: bytes, *, is_head: bool) -> None:
        asked = RANGE.match(self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - first))
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if is_head:
            return
        self.hub.downloads.append((name, first))
        half = len(content) // 2
        if name == self.hub.held:
            self.wfile.write(content[first:half])
            self.wfile.flush()
            self.hub.hold()
            self.close_connection = True
        else:
            self.wfile.write(content[first:])


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
