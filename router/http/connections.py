"""Connections of the HTTP server, with limits on their number and on silent clients.

uvicorn has a timeout for connections between two requests, but none for incomplete requests.
asyncio's accept loop logs a traceback and arms a timer for each entry of the backlog when
descriptors run out. This module replaces both.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
from contextlib import suppress
from functools import partial

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from baton.router.http.connection_slots import ConnectionLimits, ConnectionSlot, ConnectionSlots
from baton.router.http.errors import ErrorFormat, HttpFailure
from baton.router.http.json_encoding import Json
from baton.router.http.websocket_connection import WebSocketConnection, WebSocketPaths
from baton.rpc.accepting import connection_waits

ACCEPT_RETRY_S = 0.05
# Time limit of the first request of a connection that is accepted just before the server stops.
LAST_REQUEST_S = 0.5
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
ALL_CONNECTIONS_IN_USE = HttpFailure(
    503, "all connections are in use; try again in a second", "TOO_MANY_CONNECTIONS"
)

log = logging.getLogger(__name__)


class HttpConnection(H11Protocol):
    """HTTP connection with timeouts for headers, bodies and unread answers."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        limits: ConnectionLimits,
        slots: ConnectionSlots,
        slot: ConnectionSlot,
        websockets: WebSocketPaths,
    ) -> None:
        super().__init__(config, server_state, {})
        self.ws_protocol_class = partial(  # type: ignore[assignment]
            WebSocketConnection, limits, slots, slot, websockets.arriving
        )
        self._websocket_paths = websockets.paths
        self._is_upgraded = False
        self._limits = limits
        self._slots = slots
        self._slot = slot
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_deadline: asyncio.TimerHandle | None = None
        self._has_part_of_head = False
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_after(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for deadline in (self._deadline, self._unread_deadline):
            if deadline is not None:
                deadline.cancel()
        self._slots.free(self._slot)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_idle = self._is_between_requests and not self._has_part_of_head
        super().data_received(data)
        if self._is_upgraded:
            return
        if not self._is_between_requests:
            if self._is_stopping:
                self.cycle.keep_alive = False
            self._request_moved_on()
        elif was_idle:
            self._head_began()

    def _should_upgrade(self) -> bool:
        """Serve requests for other paths and methods over HTTP, whatever they could become."""
        is_served = self.scope["method"] == "GET" and self.scope["path"] in self._websocket_paths
        return is_served and super()._should_upgrade()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._is_upgraded = True
        self._close_after(None)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        self._close_after(None)  # uvicorn's keep-alive timeout applies from here
        self._has_part_of_head = False
        self._slots.note_waiting(self._slot)
        super().on_response_complete()
        if not self._is_between_requests:
            self._request_moved_on()
        elif self.conn.trailing_data[0]:  # a pipelined request has begun
            self._head_began()

    def shutdown(self) -> None:
        """Close the connection after its request. One that has served none waits for its first."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or self._has_part_of_head:
            self._is_stopping = True
            self._close_after(LAST_REQUEST_S)
        else:
            super().shutdown()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_deadline = self.loop.call_later(self._limits.unread_s, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_deadline is not None:
            self._unread_deadline.cancel()
            self._unread_deadline = None

    @property
    def is_open(self) -> bool:
        transport: asyncio.Transport | None = self.transport  # None during a handshake
        return transport is not None

    def abort(self) -> None:
        self.transport.abort()

    @property
    def _is_between_requests(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        return cycle is None or cycle.response_complete

    def _head_began(self) -> None:
        self._has_part_of_head = True
        self._slots.note_waiting(self._slot)
        self._close_after(self._limits.head_s)

    def _request_moved_on(self) -> None:
        self._has_part_of_head = False
        if self.cycle.more_body:
            self._close_after(self._limits.body_s)
        else:
            self._slots.note_answering(self._slot)
            self._close_after(None)

    def _close_after(self, wait_s: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if wait_s is not None:
            self._deadline = self.loop.call_later(wait_s, self._close_unless_paused, wait_s)

    def _close_unless_paused(self, wait_s: float) -> None:
        """Close the connection, unless reading is paused: then the client is not at fault."""
        if self.flow.read_paused:
            self._close_after(wait_s)
        else:
            self.transport.close()


class Acceptor:
    """Accepts connections up to a limit.

    At the limit, a new connection replaces the one that has waited longest for its client. If all
    connections are answering requests, the new one is refused.
    """

    def __init__(
        self,
        listening: socket.socket,
        config: uvicorn.Config,
        server_state: ServerState,
        limits: ConnectionLimits,
        errors: ErrorFormat,
        websockets: WebSocketPaths,
    ) -> None:
        """`config` must be loaded."""
        self._listening = listening
        self._listening.setblocking(False)
        self._config = config
        self._server_state = server_state
        self._limits = limits
        self._slots = ConnectionSlots()
        self._refusal = _refusal(errors.body(ALL_CONNECTIONS_IN_USE))
        self._websockets = websockets

    async def run(self) -> None:
        """Accept connections until cancelled. Open connections stay open."""
        while True:
            await connection_waits(self._listening)
            try:
                accepted, _ = self._listening.accept()
            except BlockingIOError:  # it is gone again
                continue
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    log.warning("cannot accept connections: %s", error)
                    self._slots.close_longest_waiting()
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._take(accepted)
            await asyncio.sleep(0)  # lets closed connections release their descriptors

    async def close(self, timeout_s: float) -> None:
        """Open the connections that wait to be accepted, and accept no more."""
        with self._listening, suppress(OSError):  # none waits any more
            while True:
                self._take(self._listening.accept()[0])
        if opening := self._slots.opening():
            await asyncio.wait(opening, timeout=timeout_s)

    def _take(self, accepted: socket.socket) -> None:
        is_full = len(self._slots) >= self._limits.max_connections
        if is_full and not self._slots.close_longest_waiting():
            log.warning("connection refused: all %d connections are in use", len(self._slots))
            self._refuse(accepted)
            return
        slot = self._slots.take(accepted)
        slot.opening = asyncio.ensure_future(self._open(slot))

    async def _open(self, slot: ConnectionSlot) -> None:
        def make() -> HttpConnection:
            slot.http = connection = HttpConnection(
                self._config, self._server_state, self._limits, self._slots, slot, self._websockets
            )
            return connection

        context = self._config.ssl
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                make,
                slot.socket,
                ssl=context,
                ssl_handshake_timeout=None if context is None else self._limits.handshake_s,
            )
        except OSError:
            log.debug("a TLS handshake failed", exc_info=True)
        finally:
            if slot.http is None or not slot.http.is_open:
                self._slots.free(slot)

    def _refuse(self, accepted: socket.socket) -> None:
        with accepted, suppress(OSError):
            if self._config.ssl is None:
                accepted.setblocking(False)
                accepted.send(self._refusal)


def _refusal(body: Json) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content
