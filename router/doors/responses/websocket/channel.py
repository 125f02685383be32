"""Messages of one WebSocket connection that is open: events of its client, errors as events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from baton.core.errors import InvalidRequest
from baton.router.doors.openai.errors import RefusedByCode, error_body
from baton.router.http.errors import HttpFailure
from baton.router.http.json_encoding import Json, as_json
from baton.router.http.websocket_connection import note_answering

UNSUPPORTED_DATA, GOING_AWAY, INTERNAL_ERROR, NORMAL = 1003, 1001, 1011, 1000
CREATE = "response.create"
STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}", re.ASCII)


class MessageChannel:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._is_open = True

    async def receive(self) -> bytes | None:
        """Return the next message; None once the connection is closed.

        Messages that are no text close it.
        """
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._is_open = False
            return None
        text: str | None = message.get("text")
        if text is None:
            await self.close(UNSUPPORTED_DATA, "messages must be text")
            return None
        return text.encode()

    async def send(self, frame: bytes) -> None:
        """Send a message, unless the connection is closed. Waits while the client is slow."""
        await self._emit({"type": "websocket.send", "text": frame.decode()})

    async def close(self, code: int, reason: str) -> None:
        await self._emit({"type": "websocket.close", "code": code, "reason": reason})
        self._is_open = False

    def note_answering(self, *, is_answering: bool) -> None:
        """A connection that answers is not closed in favour of a new one."""
        note_answering(self._scope, is_answering=is_answering)

    async def _emit(self, message: Json) -> None:
        if not self._is_open:
            return
        try:
            await self._send(message)
        except OSError:  # the client has disconnected
            self._is_open = False


@dataclass(frozen=True, slots=True)
class ChannelEvents:
    """Events of one response."""

    channel: MessageChannel
    stream_id: str

    def frame(self, event: Json) -> bytes:
        return as_json(in_stream(event, self.stream_id))

    async def send_frames(self, frames: Sequence[bytes], *, is_last: bool) -> None:
        for frame in frames:
            await self.channel.send(frame)


@dataclass(frozen=True, slots=True)
class CreateEvent:
    fields: Mapping[str, Any]  # of the request, as over HTTP
    is_warmup: bool = False


def take_stream_id(event: dict[str, Any]) -> str:
    """Remove the stream's id from an event; empty: there is none. Raises InvalidRequest."""
    stream_id = event.pop("stream_id", None)
    if stream_id is None:
        return ""
    if not isinstance(stream_id, str) or not STREAM_ID.fullmatch(stream_id):
        raise RefusedByCode(
            "stream_id must have 1 to 256 letters, digits, underscores, hyphens and periods",
            "stream_id",
            "invalid_stream_id",
        )
    return stream_id


def create_event_from(event: Mapping[str, Any]) -> CreateEvent:
    """Raises InvalidRequest."""
    fields = dict(event)
    kind, generate = fields.pop("type", None), fields.pop("generate", True)
    if kind != CREATE:
        shown = f"is {kind[:64]!r}" if isinstance(kind, str) else "is missing"
        raise InvalidRequest(f"type {shown}: events of clients here are {CREATE}", "type")
    if not isinstance(generate, bool):
        raise InvalidRequest("generate must be true or false", "generate")
    if fields.pop("stream", True) is not True:
        raise InvalidRequest("stream: responses over WebSocket are streams; leave it out", "stream")
    return CreateEvent({**fields, "stream": True}, is_warmup=not generate)


def error_event(failure: HttpFailure, headers: Mapping[str, str], stream_id: str = "") -> Json:
    """Return an error, with the headers that a response over HTTP would have."""
    error = {**error_body(failure)["error"], "headers": {**headers, **failure.headers}}
    event: Json = {"type": "error", "status": failure.status, "error": error}
    return in_stream(event, stream_id)


def in_stream(event: Json, stream_id: str) -> Json:
    return {**event, "stream_id": stream_id} if stream_id else event
