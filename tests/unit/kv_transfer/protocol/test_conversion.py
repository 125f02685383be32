"""Pairs whose blocks differ: which are converted, from which blocks, and through which memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from baton.core.ids import BlockId, HandoffId, Incarnation, NodeId, Peer
from baton.core.output import FirstToken
from baton.kv_transfer.config import ReceiverConfig
from baton.kv_transfer.fence import PASSED
from baton.kv_transfer.layout import KvLayout, KvPacking, MemoryKind, is_convertible
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.actions import CheckDigest, ConvertStaged, SendMessage
from baton.kv_transfer.protocol.conversion import Conversion, StagingArea
from baton.kv_transfer.protocol.incoming import IncomingState
from baton.kv_transfer.protocol.messages import Done, Fingerprint, Grant, Hello, Region, Revoked
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.types import Receive

FULL = KvLayout("bfloat16", 16, 2, 2, 8, kinds=(MemoryKind((0, 1)),))
DRAFTING = replace(FULL, num_layers=3, kinds=(MemoryKind((0, 1, 2)),))
WINDOWED = replace(FULL, kinds=(MemoryKind((0,)), MemoryKind((1,), window=24)))
RECURRENT = replace(FULL, kinds=(MemoryKind((0, 1)), MemoryKind(state="of a layer")))
UNLIKE = replace(FULL, kinds=(MemoryKind((0, 1), num_kv_heads=1, head_dim=16),))
INT8, FP8 = KvPacking.INT8, KvPacking.FP8
LINK = LinkId(1)
PEER = Peer(NodeId("p"), "p:1")


def hello(layout: KvLayout, staging_bytes: int = 0) -> Hello:
    staging = Region(1 << 20, 1, staging_bytes) if staging_bytes else None
    region, fingerprint = Region(0, 8, layout.block_bytes), Fingerprint("m", layout)
    return Hello(NodeId("n"), Incarnation("1"), fingerprint, region, "memory", b"", staging)


def conversion(source_size: int = 16, target_size: int = 32, num_blocks: int = 8) -> Conversion:
    source = replace(FULL, block_size=source_size)
    target = replace(FULL, block_size=target_size)
    made = Conversion.between(hello(source), hello(target, num_blocks * 128 * source_size))
    assert made is not None
    return made


def order(first_block: int, num_blocks: int, num_tokens: int, number: int = 0) -> Receive:
    blocks = tuple(map(BlockId, range(num_blocks)))
    return Receive(HandoffId("r", number), PEER, first_block, blocks, num_tokens)


@pytest.mark.parametrize(
    ("source", "target", "is_good"),
    [
        (FULL, replace(FULL, block_size=32), True),
        (FULL, replace(FULL, packing=INT8), True),
        (FULL, replace(FULL, packing=INT8, block_size=1), True),
        (replace(FULL, packing=INT8), replace(FULL, packing=INT8, block_size=1), True),
        (WINDOWED, replace(WINDOWED, packing=INT8), True),
        (FULL, replace(FULL, packing=FP8, block_size=32), True),
        (replace(FULL, packing=FP8), replace(FULL, packing=FP8, block_size=32), True),
        (WINDOWED, replace(WINDOWED, packing=FP8), False),
        (replace(FULL, packing=FP8), FULL, False),
        (replace(FULL, packing=FP8), replace(FULL, packing=INT8), False),
        (replace(FULL, packing=INT8), replace(FULL, packing=FP8), False),
        (WINDOWED, replace(WINDOWED, block_size=32), False),
        (RECURRENT, replace(RECURRENT, packing=INT8), False),
        (UNLIKE, replace(UNLIKE, packing=INT8), False),
        (replace(FULL, packing=INT8), FULL, False),
        (FULL, replace(FULL, packing=INT8, dtype="float32"), False),
        (FULL, replace(FULL, packing=INT8, first_head=2), False),
        (replace(FULL, packing=KvPacking.VLLM), replace(FULL, packing=INT8), False),
        (FULL, replace(WINDOWED, packing=INT8), False),
        (FULL, DRAFTING, True),
        (DRAFTING, FULL, True),
        (FULL, replace(DRAFTING, packing=INT8, block_size=32), True),
        (FULL, replace(DRAFTING, kinds=(MemoryKind((1, 2, 0)),)), False),
        (FULL, replace(DRAFTING, kinds=(*FULL.kinds, MemoryKind((2,), window=24))), False),
        (FULL, replace(DRAFTING, head_dim=4), False),
        (FULL, FULL, False),
    ],
)
def test_convertible_layouts_are_recognised(
    source: KvLayout, target: KvLayout, *, is_good: bool
) -> None:
    assert is_convertible(source, target) is is_good


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": Fingerprint("m", replace(FULL, block_size=0))},
        {
            "fingerprint": Fingerprint("m", replace(FULL, block_size=24))
        },  # not what its blocks' bytes say
        {"fingerprint": Fingerprint("other", FULL)},
        {"region": Region(0, 8, 1)},
        {"region": Region(0, 8, 1 << 40)},
    ],
    ids=["no tokens", "other tokens", "other model", "small", "large"],
)
def test_a_sender_with_a_wrong_block_size_is_not_converted(
    change: dict[str, object],
) -> None:
    receiver = hello(replace(FULL, block_size=32), 1 << 16)
    sender = hello(FULL)

    assert Conversion.between(sender, receiver) is not None
    assert Conversion.between(replace(sender, **change), receiver) is None  # type: ignore[arg-type]
    assert Conversion.between(sender, replace(receiver, staging=None)) is None


@pytest.mark.parametrize(
    ("sender", "receiver", "conversion"),
    [
        (("cpu", False), ("cpu", False), None),
        (("cuda:0", False), ("cpu", False), None),
        (("cuda:0", True), ("cuda:1", True), None),
        (("cpu", True), ("cuda:1", True), None),
        (("cpu", False), ("cuda:1", True), "device cpu to cuda:1"),
        (("cuda:0", True), ("cuda:1", False), "device cpu to cuda:1"),
    ],
)
def test_equal_blocks_are_staged_if_the_data_path_cannot_write_to_the_receiver(
    sender: tuple[str, bool], receiver: tuple[str, bool], conversion: str | None
) -> None:
    p, d = (on_device(*each) for each in (sender, receiver))

    found = Conversion.between(p, d)

    assert (None if found is None else str(found)) == conversion
    assert found is None or not found.changes_layout


def on_device(device: str, moves_device_memory: bool) -> Hello:
    said = hello(FULL, 1 << 16)
    region = replace(said.region, device=device)
    return replace(said, region=region, moves_device_memory=moves_device_memory)


def test_unequal_blocks_for_a_device_are_converted_there() -> None:
    receiver = on_device("cuda:0", False)
    receiver = replace(receiver, fingerprint=Fingerprint("m", replace(FULL, block_size=32)))
    receiver = replace(receiver, region=replace(receiver.region, block_bytes=8 * 32 * 16))

    found = Conversion.between(hello(FULL), receiver)

    assert str(found) == "device cpu to cuda:0, block_size 16 to 32"


@pytest.mark.parametrize("block_bytes", [1 << 10, 1 << 30])
def test_blocks_of_another_size_are_not_staged(block_bytes: int) -> None:
    sender, receiver = hello(FULL), on_device("cuda:0", False)

    assert Conversion.between(sender, receiver) is not None
    changed = replace(sender, region=replace(sender.region, block_bytes=block_bytes))
    assert Conversion.between(changed, receiver) is None


@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    num_tokens=st.integers(1, 300),
    num_hits=st.integers(0, 10),
)
def test_sent_blocks_cover_all_missing_tokens_from_the_first(
    sizes: tuple[int, int], num_tokens: int, num_hits: int
) -> None:
    source, target = sizes
    assume(source != target)
    converting = conversion(source, target)
    first_token = min(num_hits, num_tokens // target) * target
    missing = order(first_token // target, -(-(num_tokens - first_token) // target), num_tokens)

    run = converting.map(missing)

    needed = run.source
    if not missing.block_ids:
        assert not needed
        return
    assert needed.start * source + run.first_token == first_token
    assert run.first_token < source
    assert run.target == range(len(missing.block_ids))
    assert (needed.stop - 1) * source < num_tokens <= needed.stop * source


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([4, 16, 24]))))
def test_staging_blocks_never_overlap_and_are_all_returned(
    steps: list[tuple[bool, int, int]],
) -> None:
    area = StagingArea(Region(1 << 20, 1, 8 * 128 * 16), lambda _: PASSED)
    lent: dict[HandoffId, range] = {}
    for number, (is_lend, count, size) in enumerate(steps):
        if not is_lend and lent:
            handoff_id = next(iter(lent))
            del lent[handoff_id]
            assert area.take_back(handoff_id)
            continue
        wanted = order(0, -(-count * size // 32), count * size, number)
        staged = area.lend(conversion(size, 32, 8 * 16 // size), wanted)
        if staged is None:
            assert lent
            continue
        assert len(staged.block_ids) == count
        own = range(sum(staged.block_ids[:1]) * size, sum(staged.block_ids[-1:], 1) * size)
        if count:
            assert own.stop <= 8 * 16
            assert all(own.stop <= each.start or each.stop <= own.start for each in lent.values())
            lent[wanted.handoff_id] = own

    for handoff_id in list(lent):
        area.take_back(handoff_id)
    assert area.lend(conversion(), order(0, 4, 128, -1)) is not None


class StagedReceiver:
    """Receiver of one link whose blocks are converted, with room for two orders of 64 tokens."""

    def __init__(self) -> None:
        self.staging = StagingArea(Region(1 << 20, 1, 8 * 128 * 16), lambda _: PASSED)
        self.receiver = Receiver(ReceiverConfig(), is_one_sided=True, staging=self.staging)
        self.orders = [order(0, 2, 64, number) for number in range(3)]
        for each in self.orders:
            self.receiver.receive(each, LINK, 0.0)
        self.receiver.link_up(LINK, 0.0, conversion())

    def receive(
        self, number: int, num_blocks: int, now: float, link_id: LinkId = LINK
    ) -> HandoffId:
        wanted = order(0, num_blocks, 32 * num_blocks, number)
        self.receiver.receive(wanted, link_id, now)
        return wanted.handoff_id

    def granted(self) -> dict[HandoffId, tuple[BlockId, ...]]:
        sent = [each for each in self.receiver.take_actions() if isinstance(each, SendMessage)]
        messages = [each.message for each in sent]
        return {each.handoff_id: each.block_ids for each in messages if isinstance(each, Grant)}

    def arrive(self, number: int, digest: int | None) -> list[object]:
        done = Done(self.orders[number].handoff_id, 64, FirstToken(1), digest)
        self.receiver.arrived(LINK, number + 1, done)
        return list(self.receiver.take_actions())


def test_a_receive_waits_for_staging_blocks_and_lands_after_its_conversion() -> None:
    world = StagedReceiver()
    first, second, third = (each.handoff_id for each in world.orders)

    assert world.granted() == {first: (0, 1, 2, 3), second: (4, 5, 6, 7)}
    [convert] = world.arrive(0, None)

    assert isinstance(convert, ConvertStaged)
    assert convert.staged.order == world.orders[0]
    assert world.receiver.take_reports().finished_recving == ()
    world.receiver.converted(first)
    assert [each.handoff_id for each in world.receiver.take_reports().finished_recving] == [first]
    assert world.granted() == {third: (0, 1, 2, 3)}


def test_a_notice_that_comes_again_during_the_conversion_changes_nothing() -> None:
    world = StagedReceiver()
    first = world.orders[0].handoff_id
    world.granted()
    [check] = world.arrive(0, 7)
    assert isinstance(check, CheckDigest)
    before = world.arrive(0, 7)
    world.receiver.checked(first, is_good=True)
    [convert] = world.receiver.take_actions()
    assert isinstance(convert, ConvertStaged)

    after = world.arrive(0, 7)

    assert before == after == []
    assert world.receiver.awaits_conversion(first)


def test_a_receive_without_staging_blocks_in_time_is_lost_and_releases_its_blocks() -> None:
    world = StagedReceiver()
    world.granted()
    third = world.orders[2].handoff_id
    wait_s = ReceiverConfig().max_staging_wait_s

    world.receiver.tick(wait_s - 0.1)
    before = world.receiver.take_reports()
    world.receiver.tick(wait_s)
    reports = world.receiver.take_reports()

    assert before.failed_recving == ()
    [lost] = reports.failed_recving
    assert lost.handoff_id == third
    assert "kv-staging-memory" in lost.reason
    assert reports.released == (third,)
    assert world.granted() == {}  # nor is a grant revoked that was never sent


def test_staging_blocks_are_allocated_in_arrival_order_regardless_of_size() -> None:
    world = StagedReceiver()
    world.granted()
    first, second, third = (each.handoff_id for each in world.orders)
    world.receiver.link_up(LinkId(2), 1.0, conversion())
    large = world.receive(7, 4, 1.0)
    small = world.receive(8, 1, 2.0, LinkId(2))

    world.receiver.revoke(third, 3.0)
    for number, handoff_id in enumerate((first, second)):
        world.arrive(number, None)
        world.receiver.converted(handoff_id)
        granted = world.granted()
        assert granted.keys() == ({large} if number else set())
    world.receiver.revoke(large, 4.0)
    world.receiver.handle_message(LINK, Revoked(large), 5.0)

    assert world.granted().keys() == {small}


def test_a_receive_that_stops_waiting_for_staging_blocks_unblocks_the_next() -> None:
    world = StagedReceiver()
    first = world.orders[0].handoff_id
    world.receiver.revoke(world.orders[2].handoff_id, 0.0)
    world.granted()
    large, small = world.receive(7, 4, 1.0), world.receive(8, 1, 2.0)
    world.arrive(0, None)
    world.receiver.converted(first)

    before = world.granted()
    world.receiver.revoke(large, 3.0)

    assert before == {}
    assert world.granted().keys() == {small}


def test_blocks_with_a_wrong_digest_are_not_converted() -> None:
    world = StagedReceiver()
    world.granted()
    first, _, third = (each.handoff_id for each in world.orders)

    [check] = world.arrive(0, 7)
    assert check == CheckDigest(first, tuple(map(BlockId, range(4))), 7)
    world.receiver.checked(first, is_good=False)

    assert world.granted() == {third: (0, 1, 2, 3)}
    reports = world.receiver.take_reports()
    assert [each.handoff_id for each in reports.failed_recving] == [first]
    assert reports.finished_recving == ()
    assert not world.receiver.awaits_conversion(first)


def test_staged_blocks_of_a_revoked_receive_stay_fenced_until_no_write_can_land() -> None:
    world = StagedReceiver()
    world.granted()
    first, _, third = (each.handoff_id for each in world.orders)

    world.receiver.revoke(first, 1.0)
    assert world.granted() == {}
    world.receiver.handle_message(LINK, Revoked(first), 2.0)

    assert world.granted() == {third: (0, 1, 2, 3)}


def test_an_order_larger_than_the_staging_area_fails_with_a_named_error() -> None:
    world = StagedReceiver()
    world.granted()

    world.receiver.receive(order(0, 8, 256, 9), LINK, 1.0)

    [lost] = world.receiver.take_reports().failed_recving
    assert "kv-staging-memory is 16384 bytes" in lost.reason


def test_an_order_that_never_fits_does_not_block_the_next_once_the_link_is_up() -> None:
    world = StagedReceiver()
    for number in range(3):
        world.receiver.revoke(world.orders[number].handoff_id, 0.0)
    other = LinkId(2)
    world.receive(7, 8, 1.0, other)
    fitting = world.receive(8, 1, 1.0, other)
    for number in range(2):
        world.receiver.handle_message(LINK, Revoked(world.orders[number].handoff_id), 1.0)
    world.granted()

    world.receiver.link_up(other, 2.0, conversion())

    assert world.granted().keys() == {fitting}


@pytest.mark.parametrize("num_blocks", [1, 8], ids=["pulls", "too large"])
def test_any_number_of_receives_that_can_never_be_staged_ends(num_blocks: int) -> None:
    world, other = StagedReceiver(), LinkId(2)
    world.receiver.revoke(world.orders[2].handoff_id, 0.0)  # it waits for room
    world.receiver.take_reports()
    names = (b"name",) if num_blocks == 1 else ()
    for number in range(10, 1010):
        wanted = order(0, num_blocks, 32 * num_blocks, number)
        world.receiver.receive(replace(wanted, names=names), other, 1.0)

    world.receiver.link_up(other, 2.0, conversion())

    reports = world.receiver.take_reports()
    assert len(reports.failed_recving) == len(reports.released) == 1000
    assert [each.order for each in world.receiver.incoming()] == world.orders[:2]


@given(
    st.lists(
        st.tuples(st.sampled_from(["receive", "up", "end"]), st.integers(2, 4), st.integers(1, 9)),
        max_size=40,
    )
)
def test_no_receive_waits_while_there_is_room_for_the_first_that_waits(
    steps: list[tuple[str, int, int]],
) -> None:
    world = StagedReceiver()
    up = {LINK}
    for number, (step, link, size) in enumerate(steps, start=10):
        incoming = list(world.receiver.incoming())
        if step == "receive":
            world.receive(number, size, 0.0, LinkId(link))
        elif step == "up":
            up.add(LinkId(link))
            world.receiver.link_up(LinkId(link), 0.0, conversion())
        elif incoming:
            handoff_id = incoming[size % len(incoming)].order.handoff_id
            world.receiver.revoke(handoff_id, 0.0)
            for each in incoming:
                world.receiver.handle_message(each.link_id, Revoked(handoff_id), 0.0)
        waiting = (
            each for each in world.receiver.incoming() if each.state is IncomingState.WAITING
        )
        first = next((each.order for each in waiting if each.link_id in up), None)
        if first is not None:
            probe = replace(first, handoff_id=HandoffId("probe", number))
            assert world.staging.fits(conversion(), first)
            assert world.staging.lend(conversion(), probe) is None


def test_blocks_of_another_layout_are_not_pulled() -> None:
    world = StagedReceiver()
    world.granted()
    wanted = replace(order(0, 1, 32, 9), names=(b"name",))

    world.receiver.receive(wanted, LINK, 1.0)

    reports = world.receiver.take_reports()
    [lost] = reports.failed_recving
    assert "same layout" in lost.reason
    assert reports.released == (wanted.handoff_id,)
    assert world.granted() == {}
