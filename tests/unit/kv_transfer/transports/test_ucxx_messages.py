"""UCXX messages between both sides of a channel, over a fake wire."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports import ucxx, ucxx_receives
from baton.kv_transfer.transports.base import (
    Arrived,
    BlocksLanded,
    CancelCompleted,
    ChannelBroken,
    ChannelEvent,
    LayerRange,
    Write,
    WriteFailed,
    Written,
)
from baton.kv_transfer.transports.staging import SLOT_BYTES, Staging
from baton.kv_transfer.transports.ucxx import UcxxSends
from baton.kv_transfer.transports.ucxx_messages import HEADER_BYTES, Label, Parcel, encode_header
from baton.kv_transfer.transports.ucxx_receives import UcxxReceives
from tests.support.fake_ucxx import FakeUcxx

TICKET = 5


@dataclass
class Channel:
    """Sends of P and receives of D, each with its own memory; P's contains random bytes."""

    num_blocks: int
    block_bytes: int
    ucxx: Any = field(default_factory=FakeUcxx)
    staging: Staging = field(default_factory=Staging)  # of both sides: the stricter case
    landings: list[BlocksLanded] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.num_blocks, self.block_bytes
        self.p = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self.d = np.zeros(shape, dtype=np.uint8)
        p_region, d_region = (
            Region(int(memory.ctypes.data), *shape) for memory in (self.p, self.d)
        )
        self.sends = UcxxSends(self.ucxx, p_region, self.staging)
        self.sends.connect(None, d_region)
        self.receives = UcxxReceives(self.ucxx, None, d_region, self.staging)
        self.d_region = d_region

    def poll_d(self) -> list[ChannelEvent]:
        self.receives.look()
        self.receives.take_messages()
        return self.receives.take_events()

    def settle(self) -> list[ChannelEvent]:
        """Land everything that is sent, until nothing is in flight."""
        events: list[ChannelEvent] = []
        while True:
            events += [*self.poll_d(), *self.sends.look(), *self.poll_d()]
            under_way = self.ucxx.under_way()
            if not under_way:
                self.landings += [one for one in events if isinstance(one, BlocksLanded)]
                return [one for one in events if not isinstance(one, BlocksLanded)]
            for message in under_way:
                message.land()


def ids(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def scattered(num: int, of: int) -> tuple[tuple[BlockId, ...], tuple[BlockId, ...]]:
    draw = random.Random(num)
    return ids(*draw.sample(range(of), num)), ids(*draw.sample(range(of), num))


def whole_write(sources: tuple[BlockId, ...], targets: tuple[BlockId, ...]) -> Write:
    return Write(0, TICKET, 0, sources, targets)


def test_small_scattered_blocks_are_sent_in_one_message_and_land_in_their_slots() -> None:
    channel = Channel(64, 4096)
    sources, targets = scattered(40, of=64)
    channel.receives.expect(TICKET, targets)

    channel.sends.post(whole_write(sources, targets))
    events = channel.settle()

    assert events == [Arrived(TICKET), Written(0)]
    assert len(channel.ucxx.messages) == 1
    assert (channel.d[list(targets)] == channel.p[list(sources)]).all()
    assert not channel.d[sorted({*range(64)} - {*targets})].any()


def test_layers_are_batched_and_large_blocks_are_sent_alone_without_a_copy() -> None:
    channel = Channel(8, 1 << 20)
    sources, targets = scattered(4, of=8)
    channel.receives.expect(TICKET, targets)

    channel.sends.post(Write(0, TICKET, 0, sources, targets, LayerRange(0, 1, 16)))
    num_of_layer = len(channel.ucxx.messages)
    events = channel.settle()
    channel.sends.post(Write(1, TICKET, 0, sources, targets, LayerRange(1, 16, 16)))
    events += channel.settle()

    assert num_of_layer == 1
    assert [message.length for message in channel.ucxx.messages[1:]] == [15 << 16] * 4
    assert events == [Written(0), Arrived(TICKET), Written(1)]
    assert (channel.d[list(targets)] == channel.p[list(sources)]).all()


def test_complete_blocks_are_reported_while_others_are_pending() -> None:
    channel = Channel(8, 1 << 20)
    sources, targets = scattered(4, of=8)
    channel.receives.expect(TICKET, targets)

    later, last = Write(0, TICKET, 2, sources[2:], targets[2:]), LayerRange(3, 4, 4)
    channel.sends.post(later)
    channel.sends.post(Write(1, TICKET, 0, sources[:2], targets[:2], LayerRange(0, 3, 4)))
    channel.settle()
    early = list(channel.landings)
    channel.sends.post(Write(2, TICKET, 0, sources[:1], targets[:1], last))
    channel.settle()
    channel.sends.post(Write(3, TICKET, 1, sources[1:2], targets[1:2], last))
    events = channel.settle()

    assert early == []
    assert channel.landings == [BlocksLanded(TICKET, 1), BlocksLanded(TICKET, 4)]
    assert events == [Arrived(TICKET), Written(3)]


def test_duplicate_bytes_do_not_count_for_missing_ones() -> None:
    channel = Channel(8, 1 << 20)
    sources, targets = scattered(2, of=8)
    channel.receives.expect(TICKET, targets)

    for write_id in range(2):
        channel.sends.post(Write(write_id, TICKET, 0, sources[:1], targets[:1]))
    events = channel.settle()

    assert Arrived(TICKET) not in events


def test_a_write_beyond_the_slots_waits_and_completes_once_all_is_received() -> None:
    num = 2 * ucxx.MAX_SLOTS * SLOT_BYTES // 65536
    channel = Channel(num, 65536)
    sources, targets = scattered(num, of=num)
    channel.receives.expect(TICKET, targets)

    half = num // 2
    channel.sends.post(Write(0, TICKET, 0, sources[:half], targets[:half]))
    channel.sends.post(Write(1, TICKET, half, sources[half:], targets[half:]))
    num_begun = len(channel.ucxx.messages)
    ended_early = list(channel.sends.look())
    events = channel.settle()

    assert num_begun == ucxx.MAX_SLOTS
    assert ended_early == []
    assert sorted(events, key=str) == [Arrived(TICKET), Written(0), Written(1)]
    assert (channel.d[list(targets)] == channel.p[list(sources)]).all()


def test_slots_are_reused() -> None:
    channel = Channel(64, 65536)
    taken = set()
    for ticket in range(1, 20):
        sources, targets = scattered(60, of=64)
        channel.receives.expect(ticket, targets)
        channel.sends.post(Write(ticket, ticket, 0, sources, targets))
        channel.settle()
        taken.add(channel.staging.num_bytes)

    assert taken == {8 * SLOT_BYTES}


def test_the_receiver_takes_at_most_as_many_parcels_as_it_has_slots() -> None:
    channel = Channel(16, 4096)
    for ticket in range(1, 11):
        channel.receives.expect(ticket, ids(ticket, ticket + 2))
        parcel = Parcel(0, ids(0, 1), LayerRange(0, 1, 1))
        send_parcel(channel, encode_header(parcel), 8192, ticket)

    channel.poll_d()

    assert channel.ucxx.num_probed == ucxx_receives.MAX_SLOTS


def test_a_parcel_of_a_cancelled_ticket_writes_no_block() -> None:
    channel = Channel(16, 4096)
    channel.receives.expect(TICKET, ids(3, 5, 9))
    channel.sends.post(whole_write(ids(0, 2, 4), ids(3, 5, 9)))
    channel.poll_d()

    channel.receives.cancel(TICKET)
    quiet = channel.poll_d()
    later = channel.settle()

    assert quiet == [CancelCompleted(TICKET)]
    assert later == [Written(0)]
    assert not channel.d.any()


def test_a_cancelled_ticket_completes_only_after_the_run_being_filled() -> None:
    channel = Channel(4, 1 << 20)
    channel.receives.expect(TICKET, ids(2))
    channel.sends.post(whole_write(ids(0), ids(2)))
    channel.poll_d()

    channel.receives.cancel(TICKET)
    early = channel.poll_d()
    later = channel.settle()

    assert early == []
    assert later == [CancelCompleted(TICKET), Written(0)]


def send_parcel(channel: Channel, header: bytes, num_bytes: int, ticket: int = TICKET) -> None:
    memory = np.full(HEADER_BYTES + num_bytes, 7, dtype=np.uint8)
    memory[:HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
    tag = Label(ticket, is_parcel=True).to_tag(channel.d_region)
    channel.ucxx.send(None, memory, tag)
    kept.append(memory)


kept: list[Any] = []  # as memory of a peer is


@pytest.mark.parametrize(
    ("first", "num", "layers", "num_bytes"),
    [
        (0, 2, LayerRange(0, 1, 1), 4096),  # fewer bytes than blocks
        (2, 2, LayerRange(0, 1, 1), 8192),  # one block too far
        (9, 1, LayerRange(0, 1, 1), 4096),
        (0, 0, LayerRange(0, 1, 1), 4096),
        (0, 1, LayerRange(1, 1, 4), 4096),
        (0, 1, LayerRange(3, 5, 4), 2048),
        (0, 3, LayerRange(0, 1, 3), 4095),  # layers that a block does not have
        (0, 1, LayerRange(0, 0, 0), 4096),
        (2**40, 2**40, LayerRange(2**40, 2**41, 2**42), 4096),
        (0, 1, LayerRange(0, 1, 1), SLOT_BYTES),  # more than any slot holds
        (0, 1, LayerRange(0, 1, 1), 0),
    ],
)
def test_a_parcel_that_contradicts_its_header_breaks_the_path_and_writes_nothing(
    first: int, num: int, layers: LayerRange, num_bytes: int
) -> None:
    channel = Channel(16, 4096)
    channel.receives.expect(TICKET, ids(3, 5, 9))
    header = bytearray(encode_header(Parcel(first, ids(), layers)))
    header[8:16] = num.to_bytes(8, "little")

    send_parcel(channel, bytes(header), num_bytes)
    events = channel.settle()

    assert [type(event) for event in events] == [ChannelBroken]
    assert not channel.d.any()


def test_a_failed_send_fails_its_write_once_no_part_is_in_flight() -> None:
    num = 2 * ucxx.MAX_SLOTS * SLOT_BYTES // 65536
    channel = Channel(num, 65536)
    sources, targets = scattered(num, of=num)
    channel.sends.post(whole_write(sources, targets))
    failed, *others = [message.sent for message in channel.ucxx.messages]

    failed.completed, failed.failure = True, "endpoint timeout"
    early = list(channel.sends.look())
    for request in others:
        request.completed = True
    later = list(channel.sends.look())

    assert early == []
    assert later == [WriteFailed(0, "endpoint timeout")]
    assert len(channel.ucxx.messages) == ucxx.MAX_SLOTS


def test_a_tag_round_trips_for_regions_of_any_size() -> None:
    for region in (Region(0, 4, 1), Region(0, 1 << 20, 1 << 20)):
        unit = max(1, region.num_bytes >> 32)
        label = Label((1 << 31) - 1, region.num_bytes // 2 // unit * unit)

        assert Label.from_tag(label.to_tag(region), region) == label
        assert label.to_tag(region) < 1 << 63
