"""Sockets of KV events, tcp://HOST:PORT and ipc://PATH, and the connections to their peers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton.core.errors import InvalidConfig
from baton.node.kv.events.config import IPC, TCP, WILDCARD
from baton.node.kv.events.zmtp import MAX_FRAME_BYTES, SocketType, ZmtpError, ZmtpPeer
from baton.rpc.accepting import connection_waits

log = logging.getLogger(__name__)

# Connections that wait to be accepted.
BACKLOG = 128
# A peer whose machine is gone is noticed after about so long.
KEEPALIVE_S, KEEPALIVE_PROBES = 20, 3
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


@contextmanager
def listen(option: str, endpoint: str, host: str) -> Iterator[socket.socket]:
    """Listen on the endpoint that `option` names. `host` is what `*` stands for.

    Raises InvalidConfig if the endpoint cannot be used.
    """
    path = endpoint.removeprefix(IPC) if endpoint.startswith(IPC) else None
    try:
        if path is not None:
            listening = _listen_on_path(path)
        else:
            named, port = host_and_port(endpoint)
            listening = _listen_on_port(host.strip("[]") if named == WILDCARD else named, port)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"{option} {endpoint}: {reason}") from error
    listening.setblocking(False)
    try:
        yield listening
    finally:
        listening.close()
        if path is not None and not path.startswith("@"):
            Path(path).unlink(missing_ok=True)


def check_target(option: str, endpoint: str) -> None:
    """Raise InvalidConfig for an endpoint that nobody can connect to."""
    try:
        host_and_port(endpoint)
    except ValueError as error:
        raise InvalidConfig(f"{option} {endpoint}: {error}") from error


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Raises ValueError if there is no port."""
    host, _, port = endpoint.removeprefix(TCP).rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError("write it like tcp://HOST:PORT")
    return host.strip("[]"), int(port)


def keep_alive(connection: socket.socket) -> None:
    """Let the system end the connection when the peer's machine is gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", KEEPALIVE_S * KEEPALIVE_PROBES * 1000),
    ):
        if (number := getattr(socket, option, None)) is not None:  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, number, value)


def _listen_on_port(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)


def _listen_on_path(path: str) -> socket.socket:
    """A path that begins with `@` is a name in Linux's abstract namespace, as for libzmq."""
    listening = socket.socket(socket.AF_UNIX)
    try:
        if path.startswith("@"):
            listening.bind("\0" + path[1:])
        else:
            with suppress(FileNotFoundError):  # of a process that was killed
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    os.unlink(path)
            listening.bind(path)
        listening.listen(BACKLOG)
    except BaseException:
        listening.close()
        raise
    return listening


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
            await connection_waits(self._listening)
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
