from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Thread

import pytest

from baton.kv_transfer.tiers.copy_pace import MAX_SHARE, PACED_BYTES, CopyPace, PacedWork
from baton.kv_transfer.tiers.kv_access import copy_blocks
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory

NUM_BLOCKS = 2 * PACED_BYTES // BLOCK_BYTES + 1
WAIT_S = 30.0
LONG_S = 100 * WAIT_S  # a rest that no test waits for


class PaceWorld:
    """A pace whose clocks tests set. PacedWork is ordered now."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._cpu_s = 0.0
        self.pace = CopyPace(lambda: self.now_s, lambda: self._cpu_s)

    def use_cpu(self, cpu_s: float) -> None:
        self._cpu_s += cpu_s

    def work(self, cpu_s: float, work: PacedWork = PacedWork.WRITE_BEHIND) -> None:
        with self.pace.turn(work, self.now_s):
            self.use_cpu(cpu_s)

    def rest_s(self, work: PacedWork = PacedWork.WRITE_BEHIND) -> float:
        return self.pace.rest_s(work, self.now_s)


@pytest.fixture
def it() -> PaceWorld:
    return PaceWorld()


@pytest.fixture
def decoding(it: PaceWorld) -> PaceWorld:
    it.pace.set_decoding(True)
    return it


def test_copies_do_not_pause_without_decoding_requests(it: PaceWorld) -> None:
    it.work(cpu_s=1.0)
    it.pace.set_decoding(True)
    assert it.rest_s() <= 0  # what was done before does not count


def test_pauses_limit_the_share_of_a_core(decoding: PaceWorld) -> None:
    decoding.work(cpu_s=0.01)
    assert decoding.rest_s() == pytest.approx(0.01 / MAX_SHARE)
    decoding.now_s += 0.1
    assert decoding.rest_s() == pytest.approx(0.01 / MAX_SHARE - 0.1)


def test_threads_that_work_at_the_same_time_share_the_limit(decoding: PaceWorld) -> None:
    with decoding.pace.turn(PacedWork.WRITE_BEHIND, decoding.now_s):
        decoding.work(cpu_s=0.01)
    # Both turns count those 10 ms, as each of two threads would count its own.
    assert decoding.rest_s() == pytest.approx(0.02 / MAX_SHARE)


def test_failed_work_counts_towards_the_limit(decoding: PaceWorld) -> None:
    with suppress(OSError), decoding.pace.turn(PacedWork.WRITE_BEHIND, decoding.now_s):
        decoding.use_cpu(0.01)
        raise OSError("No space left on device")
    assert decoding.rest_s() == pytest.approx(0.01 / MAX_SHARE)


@pytest.mark.parametrize("work", PacedWork)
def test_overdue_work_runs_at_full_speed(decoding: PaceWorld, work: PacedWork) -> None:
    ordered_s, half_s = decoding.now_s, work.max_paced_s / 2
    decoding.now_s += half_s
    decoding.work(1e6, work)
    assert decoding.pace.rest_s(work, ordered_s) == pytest.approx(half_s)
    assert decoding.rest_s(work) == pytest.approx(2 * half_s)
    decoding.now_s += half_s
    assert decoding.pace.rest_s(work, ordered_s) <= 0
    assert decoding.rest_s(work) == pytest.approx(half_s)


def test_work_that_the_engine_waits_for_does_not_pause_for_other_work(decoding: PaceWorld) -> None:
    decoding.work(0.01, PacedWork.WRITE_BEHIND)
    assert decoding.rest_s(PacedWork.LOAD) <= 0
    decoding.work(0.001, PacedWork.LOAD)
    assert decoding.rest_s(PacedWork.LOAD) == pytest.approx(0.001 / MAX_SHARE)
    assert decoding.rest_s(PacedWork.WRITE_BEHIND) == pytest.approx(0.01 / MAX_SHARE)


@pytest.mark.parametrize(
    "lift",
    [lambda pace: pace.set_decoding(False), lambda pace: pace.set_short_of_room(True)],
    ids=["no decoding", "no room"],
)
def test_a_pause_ends_when_the_limit_is_lifted(
    decoding: PaceWorld, lift: Callable[[CopyPace], None]
) -> None:
    decoding.now_s += LONG_S
    decoding.work(cpu_s=1.0)
    ordered_s = decoding.now_s
    decoding.now_s -= LONG_S
    works = Event()

    def take_turn() -> None:
        with decoding.pace.turn(PacedWork.WRITE_BEHIND, ordered_s):
            works.set()

    thread = Thread(target=take_turn)
    thread.start()
    assert not works.is_set()
    lift(decoding.pace)
    assert works.wait(WAIT_S)
    thread.join()


def test_copies_are_limited_again_once_space_is_free(decoding: PaceWorld) -> None:
    decoding.pace.set_short_of_room(True)
    decoding.work(cpu_s=0.01)
    assert decoding.rest_s() <= 0
    decoding.pace.set_short_of_room(False)
    decoding.work(cpu_s=0.01)
    assert decoding.rest_s() > 0


@pytest.mark.parametrize(
    ("is_decoding", "sizes"),
    [(True, [PACED_BYTES, PACED_BYTES, BLOCK_BYTES]), (False, [2 * PACED_BYTES + BLOCK_BYTES])],
)
def test_blocks_are_copied_in_small_pieces_while_requests_decode(
    it: PaceWorld, is_decoding: bool, sizes: list[int]
) -> None:
    source, target = OwnedMemory(NUM_BLOCKS), OwnedMemory(NUM_BLOCKS, seed=1)
    copied_bytes = []

    def copy(blocks: Sequence[int], into: Sequence[int]) -> list[bytes]:
        copied_bytes.append(len(blocks) * BLOCK_BYTES)
        return copy_blocks(source.blocks, blocks, target.blocks, into)

    it.pace.set_decoding(is_decoding)
    blocks, into = range(NUM_BLOCKS), range(NUM_BLOCKS - 1, -1, -1)
    digests, _ = it.pace.copy_blocks(
        copy, BLOCK_BYTES, blocks, into, work=PacedWork.LOAD, ordered_s=it.now_s
    )

    assert copied_bytes == sizes
    assert digests == [source.blocks.digest(block) for block in blocks]
    assert all(source[block] == target[place] for block, place in zip(blocks, into, strict=True))


def test_blocks_larger_than_a_piece_are_copied_one_by_one(it: PaceWorld) -> None:
    copied = []

    def copy(blocks: Sequence[int], into: Sequence[int]) -> list[bytes]:
        copied.append(list(blocks))
        return [b""] * len(blocks)

    it.pace.set_decoding(True)
    it.pace.copy_blocks(
        copy, 2 * PACED_BYTES, [0, 1], [1, 0], work=PacedWork.LOAD, ordered_s=it.now_s
    )
    assert copied == [[0], [1]]
