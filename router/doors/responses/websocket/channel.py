"""Messages of one WebSocket connection that is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from baton.router.doors.responses.websocket.events import in_stream
from baton.router.http.json_encoding import Json, as_json
from baton.router.http.websocket_connection import note_answering

UNSUPPORTED_DATA, GOING_AWAY, INTERNAL_ERROR, NORMAL = 1003, 1001, 1011, 1000


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
