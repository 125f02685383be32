"""A small S3 server on the loopback interface, for the requests that Baton sends.

It serves the chaos benchmark and the tests.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
PAGE_OBJECTS = 3  # small, so that a few objects take several pages
_CHANGED = "2026-11-24T12:00:00.000Z"


def _no_fault(_: str) -> None:
    pass


@dataclass
class S3Server:
    """One bucket. `before` is called with the method of each request: it may wait or raise.

    Beyond `max_objects` the oldest one is deleted, as by a lifecycle rule of a bucket.
    """

    port: int = 0
    objects: dict[str, bytes] = field(default_factory=dict)
    before: Callable[[str], None] = _no_fault
    lock: Lock = field(default_factory=Lock)
    max_objects: int | None = None

    def put(self, key: str, body: bytes) -> None:
        """Store an object as the newest one. Call it under the lock."""
        self.objects.pop(key, None)
        self.objects[key] = body
        if self.max_objects is not None and len(self.objects) > self.max_objects:
            del self.objects[next(iter(self.objects))]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def s3_server(max_objects: int | None = None) -> Iterator[S3Server]:
    state = S3Server(max_objects=max_objects)
    handler = type("Handler", (_Handler,), {"state": state})
    with _Server(("127.0.0.1", 0), handler) as server:
        state.port = server.server_port
        thread = Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield state
        server.shutdown()
        thread.join()


def environment_for(server: S3Server) -> dict[str, str]:
    """Return the variables by which a process finds the server."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore clients that disconnect."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: S3Server

    def do_GET(self) -> None:
        self._serve(self._list if "list-type" in self._query else self._get)

    def do_PUT(self) -> None:
        self._serve(self._put)

    def do_DELETE(self) -> None:
        self._serve(self._delete)

    def do_POST(self) -> None:
        self._serve(self._delete_many)

    def _serve(self, reply: Callable[[bytes], None]) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            self.state.before(self.command)
            if not self.headers.get("authorization", "").startswith("AWS4-HMAC-SHA256 "):
                self._send(403)
                return
            with self.state.lock:
                reply(body)
        except OSError:
            self.close_connection = True  # without an answer

    @property
    def _query(self) -> dict[str, list[str]]:
        return parse_qs(urlsplit(self.path).query, keep_blank_values=True)

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(f"/{BUCKET}/")

    def _get(self, _: bytes) -> None:
        content = self.state.objects.get(self._key)
        if content is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send(200, content, etag=_etag(content))

    def _put(self, body: bytes) -> None:
        self.state.put(self._key, body)
        self._send(200, etag=_etag(body))

    def _delete(self, _: bytes) -> None:
        self.state.objects.pop(self._key, None)
        self._send(204)

    def _delete_many(self, body: bytes) -> None:
        keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
        for key in keys:
            self.state.objects.pop(key, None)
        done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        self._send(200, f"<DeleteResult>{done}</DeleteResult>".encode())

    def _list(self, _: bytes) -> None:
        query = self._query
        after = query.get("continuation-token", query.get("start-after", [""]))[0]
        prefix = query.get("prefix", [""])[0]
        keys = sorted(key for key in self.state.objects if key.startswith(prefix) and key > after)
        page = keys[:PAGE_OBJECTS]
        is_cut = len(keys) > len(page)
        rows = "".join(self._row(key) for key in page)
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if is_cut else ""
        head = f"<IsTruncated>{str(is_cut).lower()}</IsTruncated><KeyCount>{len(page)}</KeyCount>"
        self._send(200, f"<ListBucketResult>{head}{rows}{token}</ListBucketResult>".encode())

    def _row(self, key: str) -> str:
        content = self.state.objects[key]
        facts = f"<LastModified>{_CHANGED}</LastModified><ETag>{_etag(content)}</ETag>"
        return f"<Contents><Key>{key}</Key><Size>{len(content)}</Size>{facts}</Contents>"

    def _send(self, status: int, body: bytes = b"", etag: str = "") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("last-modified", formatdate(usegmt=True))
        if etag:
            self.send_header("etag", etag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'
