"""Slots of pinned memory that the channels to several peers share."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import BlockId
from baton.kv_transfer.config import SenderConfig
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.transports.base import (
    WHOLE_BLOCK,
    ChannelEvent,
    LayerRange,
    Write,
    Written,
)
from baton.kv_transfer.transports.pinned import NUM_SHARES, PinnedChannel, PinnedTransport
from baton.node.kv.worker import SLOT_BYTES
from tests.support.lagging_memory import Memory
from tests.support.memory_transport import MemoryChannel, MemoryTransport, Wire


def copy_nothing(
    block_ids: Sequence[BlockId], layers: LayerRange, slots: Sequence[BlockId]
) -> Fence:
    return PASSED


class Sender:
    """Channels out of the same slots, to peers that read only what a test delivers."""

    def __init__(self, num_slots: int) -> None:
        self.wire, self._slots, self._targets = Wire(), Memory(num_slots), Memory(64)
        inner = MemoryTransport(self._slots.region, self.wire)
        self._transport = PinnedTransport(inner, self._slots.region, copy_nothing)
        self._num_writes = 0

    def connect(self) -> tuple[PinnedChannel, MemoryChannel]:
        """Return both ends of a channel."""
        peer = MemoryTransport(self._targets.region, self.wire).open()
        channel = self._transport.open()
        channel.connect(peer.metadata, peer.region)
        return channel, peer

    def post(self, channel: PinnedChannel, num_blocks: int) -> int:
        self._num_writes += 1
        blocks = tuple(map(BlockId, range(num_blocks)))
        channel.post(Write(self._num_writes, 1, 0, blocks, blocks, WHOLE_BLOCK))
        return self._num_writes

    def num_in_flight(self) -> int:
        return sum(len(flight.write.sources) for flight in self.wire.flights)

    def deliver(self, peer: MemoryChannel) -> None:
        for flight in [each for each in self.wire.flights if each.target is peer]:
            for place in list(flight.missing):
                self.wire.land(flight, place)
            self.wire.acknowledge(flight)


@given(
    num_slots=st.integers(1, 64),
    posted=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 64)), max_size=12),
)
def test_frozen_peers_leave_slots_for_others(num_slots: int, posted: list[tuple[int, int]]) -> None:
    sender = Sender(num_slots)
    frozen = [sender.connect() for _ in range(4)]
    for number, num_blocks in posted:
        sender.post(frozen[number][0], num_blocks)
    num_free = num_slots - sender.num_in_flight()
    assert num_free >= num_slots >> len({number for number, _ in posted})

    channel, peer = sender.connect()
    write_id = sender.post(channel, 5)
    events: list[ChannelEvent] = []
    for _ in range(5):  # the parts of the write
        sender.deliver(peer)
        events += channel.poll()
    assert events == ([Written(write_id)] if num_free else [])

    for each, end in frozen:
        each.close()
        sender.deliver(end)
    for _ in range(6):
        events += channel.poll()
        sender.deliver(peer)
    assert events == [Written(write_id)]


@given(num_slots=st.integers(64, 2048))
def test_a_frozen_peer_takes_only_a_share_of_the_last_slots(num_slots: int) -> None:
    sender = Sender(num_slots)
    for _ in range(NUM_SHARES):
        sender.post(sender.connect()[0], num_slots)

    channel, peer = sender.connect()
    write_id = sender.post(channel, 1)
    sender.deliver(peer)
    assert channel.poll() == [Written(write_id)]


def test_a_peer_alone_may_have_as_much_in_flight_as_a_pair_allows() -> None:
    block_bytes = 2 << 20
    num_slots = SLOT_BYTES // block_bytes
    sender = Sender(num_slots)
    channel, _ = sender.connect()
    sender.post(channel, 64)
    assert sender.num_in_flight() * block_bytes >= SenderConfig().max_in_flight_bytes
