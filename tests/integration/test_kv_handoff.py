"""Hand-offs between two real processes: they land, and late writes do no damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from baton.core.ids import BlockId, HandoffId
from baton.core.output import FirstToken
from baton.kv_transfer.types import Complete, KvOrders, KvReports, Proved, Receive, Send, Withdraw
from tests.support.kv_nodes import (
    BLOCK_BYTES,
    CONFIG,
    HOLD_S,
    SILENCE_S,
    NodePlan,
    NodeProcess,
)
from tests.support.transport_endpoints import MAKERS, skip_if_missing
from tests.support.waits import await_value

KINDS = [pytest.param(kind, marks=skip_if_missing(kind)) for kind in MAKERS]
NIXL = ["nixl tcp", "nixl default"]
DATA, NEW_OWNER, EMPTY = b"K", b"n", b"-"
NUM_MANY = 2048  # 128 MiB: enough to be stopped half way
NUM_BLOCKS_PER_WRITE = CONFIG.sender.max_write_bytes // BLOCK_BYTES
MAX_ATTEMPTS = 50

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


class Nodes:
    """Starts nodes that end with the test."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, name: str, kind: str, num_blocks: int = 64) -> NodeProcess:
        plan = NodePlan(kind, str(self._folder / name), num_blocks)
        node = NodeProcess(name, plan)
        self._stack.callback(node.end)
        return node


def blocks(*numbers: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(number) for number in numbers)


def receive(
    handoff_id: HandoffId, p: NodeProcess, block_ids: tuple[BlockId, ...], first: int = 0
) -> KvOrders:
    return KvOrders(receives=(Receive(handoff_id, p.peer, first, block_ids, 16),))


def send(handoff_id: HandoffId, block_ids: tuple[BlockId, ...], first: int = 0) -> KvOrders:
    return KvOrders(sends=(Send(handoff_id, first, block_ids),))


def complete(handoff_id: HandoffId) -> KvOrders:
    return KvOrders(completes=(Complete(handoff_id, 16, FirstToken(42)),))


def has_landed(handoff_id: HandoffId, reports: KvReports) -> bool:
    return any(landed.handoff_id == handoff_id for landed in reports.finished_recving)


def until_released(d: NodeProcess, handoff_id: HandoffId) -> KvReports:
    return d.until(lambda seen: handoff_id in seen.released, f"the release of {handoff_id}")


def until_source_back(p: NodeProcess, handoff_id: HandoffId) -> KvReports:
    return p.until(lambda seen: handoff_id in seen.finished_sending, f"the end of {handoff_id}")


def hand_over(d: NodeProcess, p: NodeProcess, handoff_id: HandoffId) -> None:
    """Run a small hand-off, which must land."""
    sources, targets = blocks(3, 1, 2), blocks(7, 8, 5)
    p.call("fill_all", DATA, sources)
    d.order(receive(handoff_id, p, targets))
    p.order(send(handoff_id, sources))
    p.order(complete(handoff_id))
    d.until(lambda seen: has_landed(handoff_id, seen), f"{handoff_id} on D")
    until_source_back(p, handoff_id)
    assert d.call("num_filled", DATA, targets) == len(targets)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_land_in_their_blocks_and_only_missing_bytes_are_transferred(
    nodes: Nodes, kind: str
) -> None:
    p, d = nodes.start("p", kind), nodes.start("d", kind)
    handoff_id, sources, targets = HandoffId("r", 0), blocks(*range(10)), blocks(20, 22, 23, 24)
    p.call("fill_all", DATA, sources)

    p.order(send(handoff_id, sources[:4]))
    d.order(receive(handoff_id, p, targets, first=6))
    p.order(send(handoff_id, sources[4:8], first=4))
    p.order(send(handoff_id, sources[8:], first=8))
    p.order(complete(handoff_id))
    seen = d.until(lambda seen: has_landed(handoff_id, seen), "the hand-off")
    p.until(lambda seen: handoff_id in seen.finished_sending, "the end of the send")

    assert seen.finished_recving[0].first_token == FirstToken(42)
    assert d.call("num_filled", DATA, targets) == 4
    assert d.call("num_touched", DATA, blocks(*range(64))) == 4
    assert [record.num_bytes for record in p.call("records")] == [4 * 65536]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_prefix_hit_transfers_nothing_and_still_lands(nodes: Nodes, kind: str) -> None:
    p, d = nodes.start("p", kind), nodes.start("d", kind)
    handoff_id = HandoffId("r", 0)

    d.order(receive(handoff_id, p, (), first=3))
    p.order(send(handoff_id, blocks(0, 1, 2)))
    p.order(complete(handoff_id))

    d.until(lambda seen: has_landed(handoff_id, seen), "the hand-off")
    p.until(lambda seen: handoff_id in seen.finished_sending, "the end of the send")
    assert [record.num_bytes for record in p.call("records")] == [0]


@pytest.mark.parametrize("kind", NIXL)
def test_blocks_landed_before_the_prefill_failed_are_proved(nodes: Nodes, kind: str) -> None:
    p, d = nodes.start("p", kind), nodes.start("d", kind)
    sources, targets = blocks(*range(4)), blocks(*range(20, 28))
    p.call("fill_all", DATA, sources)

    for attempt in range(MAX_ATTEMPTS):
        handoff_id = HandoffId("r", attempt)
        d.call("fill_all", EMPTY, targets)
        d.order(receive(handoff_id, p, targets))
        p.order(send(handoff_id, sources))
        await_value(
            lambda: d.call("num_filled", DATA, targets) == len(sources), what="the first blocks"
        )
        p.order(KvOrders(withdraws=(Withdraw(handoff_id, "aborted"),)))
        proved = until_released(d, handoff_id).proved
        if proved:  # else the writes were withdrawn before they were acknowledged
            break

    assert proved == (Proved(handoff_id, len(sources)),)


@pytest.mark.parametrize("kind", KINDS)
def test_three_restarts_of_prefill_on_the_same_address_leave_decode_serving(
    nodes: Nodes, kind: str
) -> None:
    d = nodes.start("d", kind, NUM_MANY)
    pid, everything = d.pid, blocks(*range(64, NUM_MANY))

    for restart in range(3):
        p = nodes.start("p", kind, NUM_MANY)
        hand_over(d, p, HandoffId("small", restart))
        doomed = HandoffId("doomed", restart)
        d.order(receive(doomed, p, everything))
        p.order_blindly(send(doomed, everything))
        p.kill()
        assert doomed in {lost.handoff_id for lost in until_released(d, doomed).failed_recving}

    assert d.call("counters").num_fenced_blocks == 0
    assert d.pid == pid
    assert d.is_alive


@pytest.mark.parametrize("kind", KINDS)
def test_three_decode_nodes_killed_at_the_same_address_while_prefill_writes_leave_it_serving(
    nodes: Nodes, kind: str
) -> None:
    p = nodes.start("p", kind, NUM_MANY)
    pid, everything = p.pid, blocks(*range(64, NUM_MANY))

    for restart in range(3):
        d = nodes.start("d", kind, NUM_MANY)
        hand_over(d, p, HandoffId("small", restart))
        doomed = HandoffId("doomed", restart)
        d.order(receive(doomed, p, everything))
        p.order_blindly(send(doomed, everything))
        d.kill()
        p.answer_late()
        p.order(complete(doomed))
        p.call("advance_clock", HOLD_S)  # without a grant, P holds the result for so long
        until_source_back(p, doomed)

    hand_over(nodes.start("d", kind, NUM_MANY), p, HandoffId("small", 3))
    assert p.pid == pid
    assert p.is_alive


@pytest.mark.parametrize("kind", NIXL)
def test_a_late_write_never_reaches_a_new_owner(nodes: Nodes, kind: str) -> None:
    """P is stopped in the middle of a write, its hand-off is revoked, and its blocks are reused."""
    p, d = nodes.start("p", kind, NUM_MANY), nodes.start("d", kind, NUM_MANY)
    everything = blocks(*range(NUM_MANY))
    late = stop_half_way(d, p, everything)

    d.order(KvOrders(revokes=(late,)))
    d.call("advance_clock", SILENCE_S)
    if kind == "nixl tcp":
        d.until(lambda seen: late in seen.released, "the release, P being stopped")
    else:
        # P reaches into D's memory by itself, so the fence holds for as long as P may go on.
        await_value(lambda: d.call("counters").num_cut_pairs > 0, what="the cut")
        assert late not in d.call("seen").released
        assert d.call("counters").num_fenced_blocks == NUM_MANY
        p.resume()
        d.until(lambda seen: late in seen.released, "the release")
    d.call("fill_all", NEW_OWNER, everything)
    p.resume()
    p.answer_late()
    p.order(complete(late))
    p.call("advance_clock", HOLD_S)  # without a grant, P holds the result for so long
    until_source_back(p, late)

    assert d.call("num_filled", NEW_OWNER, everything) == NUM_MANY
    hand_over(d, p, HandoffId("after", 0))


@pytest.mark.parametrize("kind", ["nixl default"])
def test_a_second_process_with_the_id_of_a_frozen_one_serves_once_the_first_has_ended(
    nodes: Nodes, kind: str
) -> None:
    p, d = nodes.start("p", kind, NUM_MANY), nodes.start("d", kind, NUM_MANY)
    late = stop_half_way(d, p, blocks(*range(NUM_MANY)))
    d.order(KvOrders(revokes=(late,)))
    d.call("advance_clock", SILENCE_S)
    await_value(lambda: d.call("counters").num_cut_pairs > 0, what="the cut")

    second = nodes.start("p", kind, NUM_MANY)  # at the same address, which D redials
    d.call("advance_clock", SILENCE_S)  # D may be waiting for a Hello of the first one
    await_value(
        lambda: d.call("counters").num_cut_pairs > 10, what="refusals of the second process"
    )

    assert late not in d.call("seen").released
    assert d.call("counters").num_fenced_blocks == NUM_MANY
    p.kill()
    until_released(d, late)
    hand_over(d, second, HandoffId("after", 0))


@pytest.mark.parametrize("kind", NIXL)
def test_without_the_fence_the_same_write_corrupts_the_new_owner(nodes: Nodes, kind: str) -> None:
    p, d = nodes.start("p", kind, NUM_MANY), nodes.start("d", kind, NUM_MANY)
    everything = blocks(*range(NUM_MANY))
    late = stop_half_way(d, p, everything)

    # A decode node that takes the blocks back when it has revoked them, and not when it may.
    d.call("fill_all", NEW_OWNER, everything)
    d.order(KvOrders(revokes=(late,)))
    p.resume()
    p.answer_late()
    d.until(lambda seen: late in seen.released, "the release")

    assert d.call("num_filled", NEW_OWNER, everything) < NUM_MANY


def stop_half_way(d: NodeProcess, p: NodeProcess, block_ids: tuple[BlockId, ...]) -> HandoffId:
    """Stop P in the middle of a write. A hand-off that was stopped between writes is repeated."""
    p.call("fill_all", DATA, block_ids)
    for attempt in range(MAX_ATTEMPTS):
        handoff_id = HandoffId("late", attempt)
        d.call("fill_all", EMPTY, block_ids)
        d.order(receive(handoff_id, p, block_ids))
        p.order_blindly(send(handoff_id, block_ids))
        await_value(lambda: d.call("num_touched", DATA, block_ids) > 0, what="the first block")
        p.stop()
        if num_landed(d, block_ids) % NUM_BLOCKS_PER_WRITE:
            return handoff_id
        p.resume()
        p.answer_late()
        p.order(complete(handoff_id))
        d.until(partial(has_landed, handoff_id), f"{handoff_id} on D")
        until_source_back(p, handoff_id)
    raise AssertionError(f"P was stopped between writes {MAX_ATTEMPTS} times")


def num_landed(d: NodeProcess, block_ids: tuple[BlockId, ...]) -> int:
    """Return the number of blocks that a stopped P has begun, when D has received all of them."""
    counts = [-1]

    def last_two() -> list[int]:
        counts.append(d.call("num_touched", DATA, block_ids))
        return counts[-2:]

    _, now = await_value(last_two, lambda two: two[0] == two[1], what="no further block")
    return now
