"""Connections of the WebSocket server, with limits on silent, slow and wasteful clients.

uvicorn limits the size of a message. It has no limits on the time that a message takes, on the
number of its fragments, on what clients do not read, and on all incomplete messages together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import Scope
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame

from baton.router.byte_budget import ByteBudget, Lease
from baton.router.http.bodies import SMALL_BODY_BYTES
from baton.router.http.connection_slots import ConnectionLimits, ConnectionSlot, ConnectionSlots
from baton.rpc.errors import QueueFull

MAX_FRAGMENTS = 4096  # of a message
CONNECTION = "websocket_connection"  # key of the connection in a scope's state


@dataclass(frozen=True, slots=True)
class WebSocketPaths:
    """Paths that are served over WebSocket, and the memory for their incomplete messages."""

    paths: frozenset[str]
    arriving: ByteBudget


class WebSocketConnection(WebSocketsSansIOProtocol):
    """WebSocket connection, which keeps the slot of the HTTP connection that it was."""

    def __init__(
        self,
        limits: ConnectionLimits,
        slots: ConnectionSlots,
        slot: ConnectionSlot,
        arriving: ByteBudget,
        *,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        super().__init__(config, server_state, {**app_state, CONNECTION: self})
        self.ping_interval, self.ping_timeout = limits.ping_s, limits.unread_s
        self.close_timeout = limits.close_s
        self._limits = limits
        self._slots = slots
        self._slot = slot
        self._arriving = Lease(arriving)
        self._num_fragment_bytes = 0
        self._message_deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._message_ended()
        self._stop_unread_deadline()
        self._slots.free(self._slot)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.transport.is_closing():
            self._watch_message()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(
                CloseCode.MESSAGE_TOO_BIG, f"the message has more than {MAX_FRAGMENTS} fragments"
            )
            return
        self._num_fragment_bytes += len(event.data)
        super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        self._num_fragment_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._num_fragment_bytes = len(event.data)
        super().handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        self._message_ended()
        if self.curr_msg_data_type == "text" and not _is_utf8(self.frames):
            self._fail(CloseCode.INVALID_DATA, "the message is not UTF-8")  # uvicorn logs it
        else:
            super().send_receive_event_to_app()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # by a refusal, which uvicorn would log as a bug

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read what it is sent."""
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_deadline = self.loop.call_later(self._limits.unread_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_deadline()

    def shutdown(self) -> None:
        """Close the connection, whose responses have ended, because the server stops."""
        if self.handshake_complete and not self.close_sent:
            self.stop_keepalive()
            self._fail(CloseCode.GOING_AWAY, "the server stops")
        else:
            super().shutdown()

    def note_answering(self) -> None:
        self._slots.note_answering(self._slot)

    def note_waiting(self) -> None:
        self._slots.note_waiting(self._slot)

    def _watch_message(self) -> None:
        """Limit the memory and the time of a message that has arrived in part."""
        num_buffered = len(self.conn.reader.buffer)
        if not num_buffered and not self.frames:
            return
        if self._message_deadline is None:
            self._message_deadline = self.loop.call_later(
                self._limits.message_s,
                self._fail,
                CloseCode.POLICY_VIOLATION,
                "a message did not arrive in time",
            )
        num_bytes = num_buffered + self._num_fragment_bytes
        if num_bytes > SMALL_BODY_BYTES:
            try:
                self._arriving.grow_to(num_bytes)
            except QueueFull as error:
                self._fail(CloseCode.TRY_AGAIN_LATER, str(error))

    def _message_ended(self) -> None:
        self._num_fragment_bytes = 0
        self._arriving.release()
        if self._message_deadline is not None:
            self._message_deadline.cancel()
            self._message_deadline = None

    def _stop_unread_deadline(self) -> None:
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        if self.conn.close_sent is None:  # before the end of the handshake
            self.transport.abort()
        else:
            self.handle_parser_exception()


def _is_utf8(frames: Sequence[bytes]) -> bool:
    try:
        b"".join(frames).decode()
    except UnicodeDecodeError:
        return False
    return True


def note_answering(scope: Scope, *, is_answering: bool) -> None:
    """Note whether the connection of a scope answers, or waits for its client."""
    connection = scope.get("state", {}).get(CONNECTION)
    if isinstance(connection, WebSocketConnection):
        note = connection.note_answering if is_answering else connection.note_waiting
        note()
