"""HTTP responses: a whole body or a stream of server-sent events."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from baton.router.doors.openai.response.answers import event
from baton.router.http.errors import body_of, error_response

OF_JSON = {"content-type": "application/json"}
# Proxies must not buffer events.
OF_EVENTS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",
}


class Reply:
    """Sends one response. Before its first byte, a failure is sent with its own HTTP status."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._has_begun = False
        self.headers: dict[str, str] = {}

    async def send_body(self, body: Sequence[bytes]) -> None:
        """Send a whole body, given in slices."""
        num_bytes = sum(map(len, body))
        await self._begin({**OF_JSON, "content-length": str(num_bytes)})
        for place, piece in enumerate(body, 1):
            await self._write(piece, is_last=place == len(body))

    async def send_events(self, events: bytes, *, is_last: bool = False) -> None:
        if not self._has_begun:
            await self._begin(OF_EVENTS)
        if events:
            await self._write(events, is_last=is_last)

    async def send_error(self, error: Exception) -> None:
        if self._has_begun:
            await self._write(event(body_of(error)), is_last=True)
            return
        respond = error_response(error, self.headers)
        await respond(self._scope, self._receive, self._send)

    async def _begin(self, headers: dict[str, str]) -> None:
        self._has_begun = True
        everything = {**self.headers, **headers}
        raw = [
            (name.encode("latin-1"), value.encode("latin-1")) for name, value in everything.items()
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, *, is_last: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})
