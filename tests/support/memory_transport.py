"""In-process transport for tests, which decide when, and whether, each block of a write lands.

It models the semantics of the real transports. P's end reads its source until the write has ended
or the end is closed. Data that has left P lands at its target address as long as D's end is open
or, with direct access (`is_direct`), as long as P's end is open.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.core.ids import BlockId
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    WHOLE_BLOCK,
    Arrived,
    BlocksLanded,
    CancelCompleted,
    ChannelEvent,
    LayerRange,
    Write,
    WriteFailed,
    Written,
)

# Called with D's channel, the ticket and the block, before the block lands.
Witness = Callable[["MemoryChannel", int, BlockId], None]


@dataclass(slots=True)
class Flight:
    """A write in flight."""

    source: MemoryChannel
    target: MemoryChannel
    write: Write
    missing: list[int]  # indices into the write's blocks that have not landed
    is_acknowledged: bool = False
    left_behind: dict[int, bytes] | None = None  # data still on the wire after P's end is closed


@dataclass(slots=True)
class Wire:
    """All channels of a test, and the writes and notifications in flight between them."""

    is_one_sided: bool = True
    is_direct: bool = False  # P accesses D's memory directly: only closing P's end stops writes
    is_prompt: bool = False  # polling delivers everything in flight
    witness: Witness | None = None
    flights: list[Flight] = field(default_factory=list)
    notices: list[tuple[MemoryChannel, int, bytes]] = field(default_factory=list)
    cancels: list[tuple[MemoryChannel, int]] = field(default_factory=list)
    channels: dict[bytes, MemoryChannel] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, channel: MemoryChannel) -> bytes:
        name = str(next(self._numbers)).encode()
        self.channels[name] = channel
        return name

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is in flight and all events have been polled."""
        is_flying = self.flights or self.notices or self.cancels
        return not (is_flying or any(one.has_events for one in self.channels.values()))

    def land(self, flight: Flight, place: int) -> None:
        """Land one block of a write at its target address, even if that has a new owner."""
        flight.missing.remove(place)
        if not self._can_land(flight):
            return
        target = flight.write.targets[place]
        if self.witness is not None:
            self.witness(flight.target, flight.write.ticket, target)
        flight.target.put(target, self._bytes_of(flight, place), flight.write.layers)

    def acknowledge(self, flight: Flight) -> None:
        """Complete a write on P. Raise ValueError unless all of it has landed."""
        if flight.missing:
            raise ValueError("blocks of this write are still missing")
        self.flights.remove(flight)
        flight.source.report(Written(flight.write.write_id))
        flight.target.complete(flight.write)

    def fail(self, flight: Flight, reason: str = "the wire broke") -> None:
        """Fail a write on P. Its missing blocks may still land."""
        flight.is_acknowledged = True
        flight.source.report(WriteFailed(flight.write.write_id, reason))

    def lose(self, flight: Flight) -> None:
        """Drop the missing blocks of a write, without an event on either side."""
        self.flights.remove(flight)

    def notice(self, channel: MemoryChannel, ticket: int, note: bytes) -> None:
        self.notices.remove((channel, ticket, note))
        channel.report(Arrived(ticket, note))

    def quiet(self, channel: MemoryChannel, ticket: int) -> None:
        """Remove the cancelled receives of a ticket."""
        self.cancels.remove((channel, ticket))
        channel.posted.pop(ticket, None)
        channel.report(CancelCompleted(ticket))

    def deliver_all(self) -> None:
        for flight in list(self.flights):
            for place in list(flight.missing):
                self.land(flight, place)
            if flight.is_acknowledged:
                self.flights.remove(flight)
            else:
                self.acknowledge(flight)
        for channel, ticket, note in list(self.notices):
            self.notice(channel, ticket, note)
        for channel, ticket in list(self.cancels):
            self.quiet(channel, ticket)

    def _can_land(self, flight: Flight) -> bool:
        if flight.target.is_gone:
            return False
        if self.is_direct:
            return not flight.source.is_closed
        if flight.target.is_closed:
            return False
        return self.is_one_sided or flight.write.ticket in flight.target.posted

    def _bytes_of(self, flight: Flight, place: int) -> bytes:
        if flight.left_behind is not None:
            return flight.left_behind[place]
        return flight.source.get(flight.write.sources[place], flight.write.layers)


class MemoryTransport:
    name = "memory"
    moves_device_memory = False

    def __init__(self, region: Region, wire: Wire) -> None:
        self._region = region
        self._wire = wire

    @property
    def is_one_sided(self) -> bool:
        return self._wire.is_one_sided

    def open(self) -> MemoryChannel:
        return MemoryChannel(self._region, self._wire)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class MemoryChannel:
    def __init__(self, region: Region, wire: Wire) -> None:
        self.region = region
        self._wire = wire
        self._metadata = wire.add(self)
        self._peer: MemoryChannel | None = None
        self._events: list[ChannelEvent] = []
        self.is_closed = False
        self.is_gone = False  # its process is dead, and its memory with it
        # Two-sided: number of missing bytes by ticket and block.
        self.posted: dict[int, dict[BlockId, int]] = {}

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        peer = self._wire.channels.get(metadata)
        if peer is None:
            raise PeerUnreachable("no such memory channel")
        self._peer = peer

    def receive_into(self, region: Region) -> None:
        self.region = region

    @property
    def close_stops_writes(self) -> bool:
        return not self._wire.is_direct

    def is_peer_gone(self) -> bool:
        return self._peer is not None and self._peer.is_gone

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        if self._wire.is_one_sided:
            return
        self.posted[ticket] = dict.fromkeys(block_ids, self.region.block_bytes)
        if not block_ids:
            self.report(Arrived(ticket))

    def cancel(self, ticket: int) -> None:
        if not self._wire.is_one_sided:
            self._wire.cancels.append((self, ticket))

    def post(self, write: Write) -> None:
        if self._peer is None:
            raise PeerUnreachable("post before connect")
        missing = list(range(len(write.sources)))
        self._wire.flights.append(Flight(self, self._peer, write, missing))

    def notify(self, ticket: int, note: bytes) -> None:
        if self._wire.is_one_sided and self._peer is not None:
            self._wire.notices.append((self._peer, ticket, note))

    def poll(self) -> list[ChannelEvent]:
        if self._wire.is_prompt:
            self._wire.deliver_all()
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        """Stop reading the source. Data already on the wire stays in flight."""
        if self.is_closed:
            return
        for flight in self._wire.flights:
            if flight.source is self:
                places = flight.missing
                write = flight.write
                flight.left_behind = {i: self.get(write.sources[i], write.layers) for i in places}
                flight.is_acknowledged = True
        self.is_closed = True
        self._events.clear()

    # --- Called by the Wire ----------------------------------------------------------------

    def report(self, event: ChannelEvent) -> None:
        if not self.is_closed:
            self._events.append(event)

    def complete(self, write: Write) -> None:
        """Two-sided: count received bytes, and report Arrived when nothing is missing."""
        missing = self.posted.get(write.ticket)
        if missing is None:
            return
        for target in write.targets:
            num_bytes = len(write.layers.byte_range(self.region.block_bytes))
            missing[target] = missing.get(target, num_bytes) - num_bytes
        num_whole = len(list(itertools.takewhile(lambda block: not missing[block], missing)))
        self.report(BlocksLanded(write.ticket, num_whole))
        if not any(missing.values()):
            del self.posted[write.ticket]
            self.report(Arrived(write.ticket))

    def get(self, block_id: BlockId, layers: LayerRange = WHOLE_BLOCK) -> bytes:
        part = layers.byte_range(self.region.block_bytes)
        return ctypes.string_at(self._address(block_id) + part.start, len(part))

    def put(self, block_id: BlockId, content: bytes, layers: LayerRange = WHOLE_BLOCK) -> None:
        part = layers.byte_range(self.region.block_bytes)
        ctypes.memmove(self._address(block_id) + part.start, content, len(part))

    def _address(self, block_id: BlockId) -> int:
        if not 0 <= block_id < self.region.num_blocks:
            raise ValueError(f"block {block_id} is outside the region")
        return self.region.base + block_id * self.region.block_bytes
