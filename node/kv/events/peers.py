"""Connections to peers of a KV event socket: how many there are, and how long a handshake takes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from baton.node.kv.events.endpoints import host_and_port, keep_alive
from baton.node.kv.events.zmtp import MAX_FRAME_BYTES, SocketType, ZmtpError, ZmtpPeer

log = logging.getLogger(__name__)

MAX_PEERS = 64  # of one socket
HANDSHAKE_LIMIT_S = 5.0
# Bounds the CPU time that a flood of connections takes.
ACCEPT_PAUSE_S = 0.001
# After a failed accept, for example without free file descriptors.
ACCEPT_RETRY_S = 0.5
FIRST_RECONNECT_S, MAX_RECONNECT_S = 0.1, 5.0
# A peer's fault, or the end of its connection.
PEER_ERRORS = (OSError, EOFError, ZmtpError)

ServePeer = Callable[[ZmtpPeer], Awaitable[None]]


class PeerListener:
    """Accepts up to `MAX_PEERS` connections and serves each in a task.

    Beyond that, a new connection replaces the oldest one without a handshake, and is refused if
    there is none: silent connections cannot keep others out.
    """

    def __init__(self, listening: socket.socket, own_type: SocketType, serve: ServePeer) -> None:
        self._listening = listening
        self._own_type = own_type
        self._serve = serve
        self._peers: set[asyncio.Task[None]] = set()
        self._half_open: dict[asyncio.Task[None], None] = {}  # oldest first
        self.num_refused = 0

    async def run(self) -> None:
        while True:
            await self._connection_waits()
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:  # it is gone again
                continue
            except OSError as error:
                log.warning("no connection for KV events is accepted: %s", error)
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            self._admit(connection)
            await asyncio.sleep(ACCEPT_PAUSE_S)

    async def _connection_waits(self) -> None:
        """Wait for a connection without accepting it: a cancelled `sock_accept` may lose one."""
        loop = asyncio.get_running_loop()
        waiting = asyncio.Event()
        loop.add_reader(self._listening, waiting.set)
        try:
            await waiting.wait()
        finally:
            loop.remove_reader(self._listening)

    def _admit(self, connection: socket.socket) -> None:
        if len(self._peers) >= MAX_PEERS:
            self._note_refusal()
            oldest = next(iter(self._half_open), None)
            if oldest is None:
                connection.close()
                return
            self._forget(oldest)
            oldest.cancel()
        connection.setblocking(False)
        task = asyncio.ensure_future(self._run_peer(connection))
        self._peers.add(task)
        self._half_open[task] = None
        # Also for a task that is cancelled before it begins.
        task.add_done_callback(lambda _: connection.close())
        task.add_done_callback(self._note_end)

    async def _run_peer(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        keep_alive(connection)

        async def serve(peer: ZmtpPeer) -> None:
            if task is not None:
                self._half_open.pop(task, None)
            await self._serve(peer)

        reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME_BYTES)
        await run_peer(reader, writer, self._own_type, serve)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._forget(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("serving a peer of KV events failed", exc_info=error)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._peers.discard(task)
        self._half_open.pop(task, None)

    def _note_refusal(self) -> None:
        if not self.num_refused:
            log.warning("a KV event socket has %d peers; more are refused", MAX_PEERS)
        self.num_refused += 1


async def dial(endpoint: str, own_type: SocketType, serve: ServePeer) -> None:
    """Serve the one peer that listens at this endpoint, again after each end of its connection."""
    host, port = host_and_port(endpoint)
    pause_s = FIRST_RECONNECT_S

    async def serve_again(peer: ZmtpPeer) -> None:
        nonlocal pause_s
        pause_s = FIRST_RECONNECT_S
        await serve(peer)

    while True:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=MAX_FRAME_BYTES)
        except OSError as error:
            log.debug("%s: %s", endpoint, error)
        else:
            keep_alive(writer.get_extra_info("socket"))
            await run_peer(reader, writer, own_type, serve_again)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RECONNECT_S)


async def run_peer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    own_type: SocketType,
    serve: ServePeer,
) -> None:
    """Serve a peer until its connection ends or it makes a mistake."""
    peer = ZmtpPeer(reader, writer)
    try:
        async with asyncio.timeout(HANDSHAKE_LIMIT_S):
            await peer.shake_hands(own_type)
        await serve(peer)
    except PEER_ERRORS as error:
        log.debug("a peer of a KV event socket is disconnected: %r", error)
    finally:
        peer.abort()
