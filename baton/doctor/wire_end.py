"""One of two processes that pass bytes to each other, the way nodes pass KV."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.errors import KvTransferError
from kv_transfer.messages import Region
from kv_transfer.nixl_transport import NixlConfig, NixlTransport
from kv_transfer.transport import Arrived, Channel, Severed, Transport, Write, WriteFailed, Written
from kv_transfer.types import BlockId
from kv_transfer.ucxx_transport import UcxxConfig, UcxxTransport

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32
BLOCKS = tuple(BlockId(number) for number in range(NUM_BLOCKS))


@dataclass(frozen=True, slots=True)
class Said:
    """What one end could do, or why it could not."""

    value: Any = None
    error: str | None = None


def serve_end(pipe: Connection) -> None:
    """Obeys until the pipe is closed, which the end of the parent does, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
    end = _End(memory, pipe)
    pipe.send(Said())
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            end.close()
            os._exit(0)  # the memory is still registered somewhere: no farewell in any order
        try:
            pipe.send(Said(getattr(end, command)(*arguments)))
        except (KvTransferError, TransferBroke) as error:
            pipe.send(Said(error=str(error)))


class TransferBroke(RuntimeError):
    """The transport reported that a write failed."""


class _End:
    def __init__(self, memory: mmap.mmap, pipe: Connection) -> None:
        self._pipe = pipe
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._region = Region(base, NUM_BLOCKS, BLOCK_BYTES)
        self._channel: Channel | None = None
        self._transport: Transport | None = None

    def open(self, name: str, tls: str) -> tuple[bytes, Region]:
        """What the other end needs in order to reach this one."""
        self._transport = _transport(name, tls, self._region)
        self._channel = self._transport.open()
        return self._channel.metadata, self._region

    def connect(self, metadata: bytes, region: Region) -> None:
        self._open_channel.connect(metadata, region)

    def names(self) -> list[str]:
        """The ways that UCX has here; NIXL does not tell."""
        return self._transport.ways if isinstance(self._transport, UcxxTransport) else []

    def take(self, ticket: int) -> None:
        channel = self._open_channel
        channel.expect(ticket, BLOCKS)
        while True:
            for event in channel.poll():
                if event == Arrived(ticket):
                    return
                _refuse(event)

    def write(self, ticket: int) -> float:
        """Seconds from the post to the end of the last write."""
        channel = self._open_channel
        began_s = time.perf_counter()
        channel.post(Write(ticket, ticket, 0, BLOCKS, BLOCKS))
        while Written(ticket) not in (events := channel.poll()):
            for event in events:
                _refuse(event)
        took_s = time.perf_counter() - began_s
        channel.notify(ticket, b"")
        return took_s

    def rest(self) -> None:
        """P: the notification needs it until D has it all."""
        while not self._pipe.poll():
            self._open_channel.poll()

    def done(self) -> None:
        """The letter that ends a rest."""

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    @property
    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise TransferBroke("nothing is open")
        return self._channel


def _refuse(event: object) -> None:
    if isinstance(event, WriteFailed | Severed):
        raise TransferBroke(event.reason)


def _transport(name: str, tls: str, region: Region) -> Transport:
    devices = "lo" if tls == "tcp" else ""
    if name == "nixl":
        return NixlTransport(region, NixlConfig(tls, devices))
    return UcxxTransport(region, UcxxConfig(f"{tls},self" if tls else "", devices))
