"""ZMTP 3.0, the protocol of ZeroMQ sockets, on an asyncio stream, with a limit for all that a peer
may send.

libzmq is not used here, since it has no limit for the number of connections, for the frames of a
message and for the subscriptions of a peer: one connection could take all memory of a node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from enum import Enum

MAX_FRAME_BYTES = 4096  # of a peer: subscriptions, replay requests and the handshake are short
MAX_FRAMES = 4  # of one message of a peer
# A peer that sends more than one message in this time is read slowly.
READ_PAUSE_S = 0.01
# A peer that reads nothing for so long is disconnected.
STALL_LIMIT_S = 30.0
WRITE_BYTES = 65536  # at a time: also of a long message, only so much is buffered

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
MAJOR, MINOR = 3, 0
MECHANISM = b"NULL"
GREETING = SIGNATURE + bytes((MAJOR, MINOR)) + MECHANISM.ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4  # flags of a frame
READY, PING, PONG = b"READY", b"PING", b"PONG"
SOCKET_TYPE = b"socket-type"
PING_TTL_BYTES = 2


class ZmtpError(Exception):
    """A peer violates the protocol or a limit."""


class SocketType(Enum):
    PUB = b"PUB"
    ROUTER = b"ROUTER"


PEER_TYPES = {
    SocketType.PUB: (b"SUB", b"XSUB"),
    SocketType.ROUTER: (b"DEALER", b"REQ", b"ROUTER"),
}


class ZmtpPeer:
    """The other end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._writing = asyncio.Lock()

    async def shake_hands(self, own_type: SocketType) -> None:
        """Raises ZmtpError if the peer does not fit, and EOFError or OSError if it disconnects."""
        self._writer.write(GREETING + _frame(_ready(own_type), COMMAND))
        greeting = await self._reader.readexactly(len(GREETING))
        if greeting[0] != SIGNATURE[0] or greeting[9] != SIGNATURE[9] or greeting[10] < MAJOR:
            raise ZmtpError("the peer does not speak ZMTP 3")
        if greeting[12:32].rstrip(b"\0") != MECHANISM:
            raise ZmtpError("the peer requires authentication")
        flags, body = await self._read_frame()
        name, content = _command(body)
        if not flags & COMMAND or name != READY:
            raise ZmtpError("the peer sent no READY")
        if (peer_type := dict(_properties(content)).get(SOCKET_TYPE)) not in PEER_TYPES[own_type]:
            raise ZmtpError(f"a {peer_type!r} socket cannot use a {own_type.value!r} socket")

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message; answer commands before it."""
        frames: list[bytes] = []
        while True:
            flags, body = await self._read_frame()
            if flags & COMMAND:
                await self._handle_command(body)
                await asyncio.sleep(READ_PAUSE_S)
                continue
            frames.append(body)
            if not flags & MORE:
                return frames
            if len(frames) == MAX_FRAMES:
                raise ZmtpError(f"a message has more than {MAX_FRAMES} frames")

    async def send(self, frames: Sequence[bytes]) -> None:
        """Raises TimeoutError if the peer reads nothing for `STALL_LIMIT_S`."""
        *leading, last = frames
        head = b"".join(_frame(frame, MORE) for frame in leading) + _header(len(last), 0)
        await self._write(head, last)

    def abort(self) -> None:
        """Disconnect, without waiting for what is not sent yet."""
        self._writer.transport.abort()

    async def _handle_command(self, body: bytes) -> None:
        name, content = _command(body)
        if name == PING:
            pong = bytes((len(PONG),)) + PONG + content[PING_TTL_BYTES:]
            await self._write(_frame(pong, COMMAND), b"")

    async def _read_frame(self) -> tuple[int, bytes]:
        """Return flags and body."""
        [flags] = await self._reader.readexactly(1)
        size = int.from_bytes(await self._reader.readexactly(8 if flags & LONG else 1), "big")
        if size > MAX_FRAME_BYTES:
            raise ZmtpError(f"a frame of {size} bytes is longer than {MAX_FRAME_BYTES}")
        return flags, await self._reader.readexactly(size)

    async def _write(self, head: bytes, content: bytes) -> None:
        async with self._writing:
            if len(head) + len(content) <= WRITE_BYTES:
                await self._write_some(head + content)
                return
            await self._write_some(head)
            view = memoryview(content)
            for start in range(0, len(content), WRITE_BYTES):
                await self._write_some(view[start : start + WRITE_BYTES])

    async def _write_some(self, some: bytes | memoryview) -> None:
        self._writer.write(some)
        async with asyncio.timeout(STALL_LIMIT_S):
            await self._writer.drain()


def _header(size: int, flags: int) -> bytes:
    if size > 255:
        return bytes((flags | LONG,)) + size.to_bytes(8, "big")
    return bytes((flags, size))


def _frame(body: bytes, flags: int) -> bytes:
    return _header(len(body), flags) + body


def _ready(own_type: SocketType) -> bytes:
    name, value = b"Socket-Type", own_type.value
    ready = bytes((len(READY),)) + READY
    return ready + bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _command(body: bytes) -> tuple[bytes, bytes]:
    """Return name and content."""
    size = body[0] if body else 0
    return body[1 : 1 + size], body[1 + size :]


def _properties(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield names, in lower case, and values. What is cut off ends them."""
    while content:
        name, content = _command(content)
        size, content = int.from_bytes(content[:4], "big"), content[4:]
        yield name.lower(), content[:size]
        content = content[size:]
