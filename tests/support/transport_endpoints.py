"""Endpoints of a data path as processes that run the commands of a test.

An endpoint polls continuously and records the events of its channel. The in-memory transport has
both endpoints in the test process, with the same commands.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from multiprocessing.connection import Connection
from typing import Any, Protocol

import pytest

from baton.core.ids import BlockId
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Channel,
    ChannelEvent,
    LayerRange,
    Transport,
    UcxConfig,
    Write,
)
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.pinned import PinnedTransport
from baton.kv_transfer.transports.ucxx import UcxxTransport
from tests.support.forked_forkserver import fork_context
from tests.support.lagging_memory import Memory
from tests.support.memory_transport import MemoryTransport, Wire

WAIT_S = 60.0  # for what must come
POLL_S = 0.001
NUM_SLOTS = 3  # of pinned memory
MakeTransport = Callable[[Region], Transport]


def nixl_over_tcp(region: Region) -> Transport:
    return NixlTransport(region, UcxConfig(tls="tcp", net_devices="lo"))


def nixl_by_default(region: Region) -> Transport:
    return NixlTransport(region, UcxConfig())


def ucxx_over_tcp(region: Region) -> Transport:
    return UcxxTransport(region, UcxConfig(tls="tcp,self", net_devices="lo"))


def ucxx_by_default(region: Region) -> Transport:
    return UcxxTransport(region, UcxConfig())


MAKERS: dict[str, MakeTransport] = {
    "nixl tcp": nixl_over_tcp,
    "nixl default": nixl_by_default,
    "ucxx tcp": ucxx_over_tcp,
    "ucxx default": ucxx_by_default,
}


def skip_if_missing(kind: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if the library of this transport is not installed."""
    module = "ucxx" if kind.startswith("ucxx") else "numpy"
    reason = f"{module} is not installed: pip install -e '.[ucxx]'"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


@dataclass(slots=True)
class EndpointState:
    """State of an endpoint in its process: memory, transport and current channel."""

    make: MakeTransport
    region: Region
    buffer: Any  # keeps the region alive
    transport: Transport
    channel: Channel
    events: list[ChannelEvent] = field(default_factory=list)

    def reshape(self, num_blocks: int, block_bytes: int) -> None:
        """Replace memory, transport and channel."""
        self.channel.close()
        self.transport.close()
        fresh = make_endpoint(self.make, num_blocks, block_bytes)
        self.region, self.buffer = fresh.region, fresh.buffer
        self.transport, self.channel, self.events = fresh.transport, fresh.channel, []

    def reopen(self) -> None:
        self.channel.close()
        self.channel = self.transport.open()
        self.events.clear()

    def close(self) -> None:
        self.channel.close()

    def metadata(self) -> tuple[bytes, Region]:
        return self.channel.metadata, self.region

    def connect(self, metadata: bytes, region: Region) -> None:
        self.channel.connect(metadata, region)

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self.channel.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self.channel.cancel(ticket)

    def post(self, write: Write) -> None:
        self.channel.post(write)

    def notify(self, ticket: int, note: bytes = b"") -> None:
        self.channel.notify(ticket, note)

    def seen(self) -> list[ChannelEvent]:
        return list(self.events)

    def fill(self, block_id: BlockId, content: bytes) -> None:
        ctypes.memmove(self.region.base + block_id * self.region.block_bytes, content, len(content))

    def read(self, block_id: BlockId) -> bytes:
        address = self.region.base + block_id * self.region.block_bytes
        return ctypes.string_at(address, self.region.block_bytes)

    def close_stops_writes(self) -> bool:
        return self.channel.close_stops_writes

    def num_open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def is_peer_gone(self) -> bool:
        return self.channel.is_peer_gone()

    def poll(self) -> None:
        if not getattr(self.channel, "is_closed", False):
            self.events += self.channel.poll()


def make_endpoint(make: MakeTransport, num_blocks: int, block_bytes: int) -> EndpointState:
    region, buffer = reserve_region(num_blocks, block_bytes)
    transport = make(region)
    return EndpointState(make, region, buffer, transport, transport.open())


def reserve_region(num_blocks: int, block_bytes: int) -> tuple[Region, mmap]:
    """Return a region and its buffer of zeros. Unused pages take no memory."""
    buffer = mmap(-1, num_blocks * block_bytes, MAP_PRIVATE | MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return Region(base, num_blocks, block_bytes), buffer


class Endpoint(Protocol):
    def call(self, command: str, *arguments: Any) -> Any: ...


class ProcessEndpoint:
    """Endpoint in a child process, which can be stopped, killed and restarted."""

    def __init__(self, make: MakeTransport) -> None:
        context = fork_context()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self._process.start()
        theirs.close()
        self.wait_for_answer()

    def call(self, command: str, *arguments: Any) -> Any:
        self.send(command, *arguments)
        return self.wait_for_answer()

    def send(self, command: str, *arguments: Any) -> None:
        self._connection.send((command, arguments))

    def wait_for_answer(self) -> Any:
        if not self._connection.poll(WAIT_S):
            raise TimeoutError("the end did not answer")
        return self._connection.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGCONT)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        """Close the channel and end the process, if it is alive."""
        if self.is_alive:
            self.resume()
            self.call("close")
            self._connection.send(None)
            self._process.join(WAIT_S)
        self.kill()


def _serve(connection: Connection, make: MakeTransport) -> None:
    end, is_closed = make_endpoint(make, num_blocks=1, block_bytes=1), False
    connection.send("ready")
    while True:
        if not is_closed:
            end.poll()
        if not connection.poll(None if is_closed else POLL_S):
            continue
        request = connection.recv()
        if request is None:
            return
        command, arguments = request
        connection.send(getattr(end, command)(*arguments))
        is_closed = command == "close" or (is_closed and command not in ("reopen", "reshape"))


class EndpointPool:
    """Pool of endpoint processes, reused between tests because their start is slow."""

    def __init__(self) -> None:
        self._idle: dict[str, list[ProcessEndpoint]] = {}

    @contextmanager
    def end(self, kind: str, num_blocks: int, block_bytes: int) -> Iterator[ProcessEndpoint]:
        idle = self._idle.setdefault(kind, [])
        end = idle.pop() if idle else ProcessEndpoint(MAKERS[kind])
        try:
            end.call("reshape", num_blocks, block_bytes)
            yield end
            if end.is_alive:
                end.resume()
                end.call("close")
                idle.append(end)
        finally:
            if end not in idle:
                end.kill()

    def close(self) -> None:
        for ends in self._idle.values():
            for end in ends:
                end.end()


class LocalEndpoint:
    """Endpoint in this process, for the in-memory transport."""

    def __init__(self, state: EndpointState) -> None:
        self._state = state

    def call(self, command: str, *arguments: Any) -> Any:
        self._state.poll()
        return getattr(self._state, command)(*arguments)


@dataclass(slots=True)
class EndpointPair:
    """A decode endpoint and a prefill endpoint."""

    d: Endpoint
    p: Endpoint

    def connect(self) -> None:
        self.p.call("connect", *self.d.call("metadata"))
        self.d.call("connect", *self.p.call("metadata"))


def memory_endpoints(
    num_blocks: int, block_bytes: int, *, is_one_sided: bool = True, is_pinned: bool = False
) -> EndpointPair:
    """With `is_pinned`, P sends through a few slots of host memory."""
    wire = Wire(is_prompt=True, is_one_sided=is_one_sided)

    def make(region: Region) -> Transport:
        return MemoryTransport(region, wire)

    def make_pinned(region: Region) -> Transport:
        slots = Memory(NUM_SLOTS, region.block_bytes)
        transport = MemoryTransport(slots.region, wire)
        return PinnedTransport(transport, slots.region, partial(copy_at_once, region, slots))

    d, p = (
        LocalEndpoint(make_endpoint(each, num_blocks, block_bytes))
        for each in (make, make_pinned if is_pinned else make)
    )
    return EndpointPair(d, p)


def copy_at_once(
    region: Region,
    slots: Memory,
    block_ids: Sequence[BlockId],
    layers: LayerRange,
    into: Sequence[BlockId],
) -> Fence:
    part = layers.byte_range(region.block_bytes)
    for block, slot in zip(block_ids, into, strict=True):
        to, source = (
            each.base + number * each.block_bytes + part.start
            for each, number in ((slots.region, slot), (region, block))
        )
        ctypes.memmove(to, source, len(part))
    return PASSED
