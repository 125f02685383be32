"""Measured KV transfer rate between two processes, for each transport."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from baton.core.errors import NamedError
from baton.core.ids import BlockId
from baton.doctor.findings import Finding, fail, ok, warn
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import Arrived, Channel, Transport, Write, Written
from baton.kv_transfer.transports.ucxx import UcxxTransport
from baton.measured_process import MeasuredProcess, MeasurementFailed, open_transport, poll_until

NUM_RUNS = 5
TLS = ("", "tcp")  # UCX_TLS: UCX's choice (shared memory on one machine), and TCP
SLOW_GB_PER_S = 0.2
BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 32
BLOCKS = tuple(BlockId(number) for number in range(NUM_BLOCKS))


@dataclass(frozen=True, slots=True)
class MeasuredPath:
    transport: str
    tls: str  # UCX_TLS; empty for UCX's choice

    @property
    def name(self) -> str:
        return f"{self.transport} over {self.tls or 'what UCX chooses'}"


def check_transfer_rate(transports: Sequence[str], patience_s: float) -> Iterator[Finding]:
    """Measure each transport with UCX's choice and over TCP, within `patience_s` per transport."""
    for transport in transports:
        ways = [MeasuredPath(transport, tls) for tls in TLS]
        deadline_s = time.monotonic() + patience_s
        try:
            with _pair(deadline_s) as pair:
                for way in ways:
                    yield speed_finding(way, pair.measure(way))
                if pair.names:
                    yield ok("UCX has", ", ".join(pair.names))
        except MeasurementFailed as failure:
            yield failure_finding(transport, str(failure))


def speed_finding(way: MeasuredPath, gb_per_s: float) -> Finding:
    found = f"{gb_per_s:.2f} GB/s between two processes"
    if gb_per_s < SLOW_GB_PER_S:
        return warn(way.name, found, "hand-offs will be slow: see docs/handoff-figures.md")
    return ok(way.name, found)


def failure_finding(transport: str, reason: str) -> Finding:
    if transport == "nixl":
        advice = "nodes cannot transfer KV over it: check UCX_* in the environment, or use ucxx"
        return fail("nixl", reason, advice)
    return warn(transport, reason, f"--kv-transport {transport} does not work here; nixl may")


class _EndPair:
    def __init__(self, decode: MeasuredProcess, prefill: MeasuredProcess) -> None:
        self._decode, self._prefill = decode, prefill
        self._num_tickets = 0
        self.names: list[str] = []  # transports that UCX has here; empty until an end reported them

    def measure(self, way: MeasuredPath) -> float:
        """Return the median rate in GB/s. An unmeasured first run connects and maps pages."""
        decode_end = self._decode.call("open", way.transport, way.tls)
        prefill_end = self._prefill.call("open", way.transport, way.tls)
        self._decode.call("connect", *prefill_end)
        self._prefill.call("connect", *decode_end)
        self._run()
        seconds = statistics.median(self._run() for _ in range(NUM_RUNS))
        self.names = self.names or self._decode.call("names")
        for end in (self._decode, self._prefill):
            end.call("close")
        return NUM_BLOCKS * BLOCK_BYTES / seconds / 1e9

    def _run(self) -> float:
        self._num_tickets += 1
        self._decode.send("receive", self._num_tickets)
        seconds: float = self._prefill.call("write", self._num_tickets)
        self._prefill.send("progress")
        self._decode.receive()
        self._prefill.send("stop_progress")
        self._prefill.receive()
        self._prefill.receive()
        return seconds


@contextmanager
def _pair(deadline_s: float) -> Iterator[_EndPair]:
    def remaining_s() -> float:
        return max(0.0, deadline_s - time.monotonic())

    with ExitStack() as stack:
        ends = [
            stack.enter_context(closing(MeasuredProcess(serve_end, remaining_s=remaining_s)))
            for _ in range(2)
        ]
        for end in ends:
            end.receive()
        yield _EndPair(*ends)


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
