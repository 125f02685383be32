"""Process at one end of a transfer measurement, using the KV transports of nodes."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from multiprocessing.connection import Connection

from baton.core.errors import NamedError
from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Arrived,
    Channel,
    Transport,
    Write,
    Written,
)
from baton.kv_transfer.transports.ucxx import UcxxTransport
from baton.measured_process import MeasurementFailed, open_transport, poll_until

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32
BLOCKS = tuple(BlockId(number) for number in range(NUM_BLOCKS))


def serve_end(pipe: Connection) -> None:
    """Execute commands until the pipe is closed, at the latest when the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES)
    end = _TransferEnd(memory, pipe)
    pipe.send("ready")
    while True:
        try:
            command, arguments = pipe.recv()
        except EOFError:
            end.close()
            os._exit(0)  # skip destructors: the memory is still registered
        try:
            pipe.send(getattr(end, command)(*arguments))
        except NamedError as error:
            pipe.send(MeasurementFailed(str(error)))


class _TransferEnd:
    def __init__(self, memory: mmap.mmap, pipe: Connection) -> None:
        self._pipe = pipe
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._region = Region(base, NUM_BLOCKS, BLOCK_BYTES)
        self._channel: Channel | None = None
        self._transport: Transport | None = None

    def open(self, name: str, tls: str) -> tuple[bytes, Region]:
        """Open a channel and return the metadata that the other end needs to connect."""
        self._transport = open_transport(name, tls, self._region)
        self._channel = self._transport.open()
        return self._channel.metadata, self._region

    def connect(self, metadata: bytes, region: Region) -> None:
        self._open_channel.connect(metadata, region)

    def names(self) -> list[str]:
        """Return the transports that UCX has here; NIXL does not report them."""
        return self._transport.ways if isinstance(self._transport, UcxxTransport) else []

    def receive(self, ticket: int) -> None:
        channel = self._open_channel
        channel.expect(ticket, BLOCKS)
        poll_until(channel, Arrived(ticket))

    def write(self, ticket: int) -> float:
        """Write all blocks. Return the seconds from the post to the end of the last write."""
        channel = self._open_channel
        began_s = time.perf_counter()
        channel.post(Write(ticket, ticket, 0, BLOCKS, BLOCKS))
        poll_until(channel, Written(ticket))
        took_s = time.perf_counter() - began_s
        channel.notify(ticket, b"")
        return took_s

    def progress(self) -> None:
        """Poll the channel until the parent's next command, to deliver the notification."""
        while not self._pipe.poll():
            self._open_channel.poll()

    def stop_progress(self) -> None:
        """Command that ends `progress`."""

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    @property
    def _open_channel(self) -> Channel:
        if self._channel is None:
            raise MeasurementFailed("no channel is open")
        return self._channel
