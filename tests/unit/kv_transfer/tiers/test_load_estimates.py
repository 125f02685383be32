"""Loads next to stores while requests decode: their waits, and what tiers learn from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread

import pytest

from baton.core.kv_hints import BlockHints
from baton.kv_transfer.external_kv import FILE, HOST
from baton.kv_transfer.tiers import copy_pace
from baton.kv_transfer.tiers.copy_pace import MAX_SHARE
from baton.kv_transfer.tiers.stores.store_kinds import FILES
from baton.kv_transfer.tiers.tier_status import HALF_LIFE_S
from baton.kv_transfer.tiers.tiered_kv import HOST_BYTES_PER_S
from tests.support.block_stores import FolderWorld
from tests.support.tier_memory import BLOCK_BYTES, name_of
from tests.support.tier_world import FaultyStore, TierWorld, tier_world
from tests.support.virtual_time import PricedCopies, VirtualClock, VirtualPace

# The first guesses are right, so any other estimate is wrong.
COPY_S, READ_S = BLOCK_BYTES / HOST_BYTES_PER_S, BLOCK_BYTES / FILES.bytes_per_s


@dataclass
class DecodingNode:
    it: TierWorld
    clock: VirtualClock
    pace: VirtualPace
    copies: PricedCopies

    def estimate_s(self, block: int) -> float:
        return self.it.tiers.load_s([name_of(block)])

    def loads_began_s(self) -> list[float]:
        """Return when the copies from host memory to the KV cache began."""
        return [began_s for target, began_s in self.copies.log if target != self.it.host.memory]


class Disk(FaultyStore):
    """Files whose operations take virtual time. They have the blocks of an earlier node."""

    def __init__(self, folder: Path, blocks: Sequence[int]) -> None:
        with tier_world(files=FolderWorld(folder).open()) as it:
            it.store(*blocks)
        super().__init__(FolderWorld(folder).open())
        self.clock = VirtualClock()
        self.operation_s = {"read": READ_S, "write": READ_S}
        self.reads_began_s: list[float] = []
        self.before = self._take_time

    def _take_time(self, operation: str, _: bytes) -> None:
        if operation == "read":
            self.reads_began_s.append(self.clock())
        self.clock.advance(self.operation_s.get(operation, 0.0))

    def hints_of(self, name: bytes) -> BlockHints:
        self.before("promote", name)
        return super().hints_of(name)


@contextmanager
def decoding_node(disk: Disk | None = None) -> Iterator[DecodingNode]:
    clock = VirtualClock() if disk is None else disk.clock
    pace, copies = VirtualPace(clock), PricedCopies(clock, COPY_S)
    with tier_world(32, disk, copy=copies, clock=clock, pace=pace, num_kv_blocks=32) as it:
        pace.set_decoding(True)
        yield DecodingNode(it, clock, pace, copies)


@pytest.fixture(autouse=True)
def _blocks_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_pace, "PACED_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(copy_pace, "FULL_SPEED_BYTES", BLOCK_BYTES)


@pytest.mark.parametrize("slow_s", [0.0, 1.0], ids=["limited", "at full speed"])
def test_a_load_waits_for_one_piece_of_a_store_and_its_estimate_stays(slow_s: float) -> None:
    """Such as the first copy into memory, one copy may be slow; the others then catch up."""
    with decoding_node() as node:
        node.it.store(0)
        ordered: list[tuple[int, float]] = []

        def order(number: int) -> None:
            if number == 4:
                node.clock.advance(slow_s)
            if number == 6:
                ordered.append((node.it.start_load([0], into=31), node.clock()))

        node.copies.before = order
        node.it.end_of_store(node.it.start_store(*range(1, 30)))
        ((load, ordered_s),) = ordered
        assert node.it.end_of(load) == (HOST,)

        (began_s,) = node.loads_began_s()
        assert began_s - ordered_s <= 1.1 * COPY_S
        assert node.estimate_s(0) == pytest.approx(COPY_S)


def test_a_load_ends_the_pause_of_a_store() -> None:
    with decoding_node() as node:
        node.it.store(0)
        ordered: list[tuple[int, float]] = []

        def order() -> None:
            if not ordered:
                ordered.append((node.it.start_load([0], into=31), node.clock()))

        node.pace.in_rest = order
        node.it.store(1, 2, 3, 4)
        ((load, ordered_s),) = ordered
        assert node.it.end_of(load) == (HOST,)

        (began_s,) = node.loads_began_s()
        assert began_s - ordered_s <= 1.1 * COPY_S


def test_small_loads_while_requests_decode_do_not_raise_the_estimate() -> None:
    with decoding_node() as node:
        node.it.store(*range(4))
        for _ in range(20):
            node.it.load([0, 1, 2], into=29)
        assert node.pace.rests_s
        assert node.estimate_s(0) == pytest.approx(COPY_S)


def test_small_loads_from_files_while_requests_decode_do_not_raise_the_estimate(
    tmp_path: Path,
) -> None:
    disk = Disk(tmp_path, range(16))
    with decoding_node(disk) as node:
        for block in range(15):
            assert node.it.load([block], into=31) == (FILE,)
        assert node.pace.rests_s
        assert node.estimate_s(15) == pytest.approx(READ_S)


def test_promoting_a_block_is_limited_as_part_of_its_load(tmp_path: Path) -> None:
    disk = Disk(tmp_path, [1, 2])
    disk.operation_s["promote"] = READ_S
    with decoding_node(disk) as node:
        assert node.it.load([1, 2], into=30) == (FILE, FILE)
        assert node.pace.rests_s == [pytest.approx(2 * READ_S / MAX_SHARE)]


def test_a_load_ends_the_pause_of_a_write(tmp_path: Path) -> None:
    disk = Disk(tmp_path, [9])
    with decoding_node(disk) as node:
        ordered: list[tuple[int, float]] = []

        def order() -> None:
            if current_thread().name == "kv-file-tier" and not ordered:
                ordered.append((node.it.start_load([9], into=31), node.clock()))
                node.it.wait_until(lambda: node.estimate_s(9) > 1.5 * READ_S)  # it is queued

        node.pace.in_rest = order
        node.it.store(1, 2, 3)
        node.it.wait_until(lambda: bool(ordered))
        ((load, ordered_s),) = ordered
        assert node.it.end_of(load) == (FILE,)

        (began_s,) = disk.reads_began_s
        assert began_s - ordered_s < 10 * READ_S


def test_a_paused_write_does_not_make_its_tier_look_stuck(tmp_path: Path) -> None:
    disk = Disk(tmp_path, [9])
    disk.operation_s["write"] = 1.0
    with decoding_node(disk) as node:
        estimates_s: list[float] = []

        def look() -> None:
            if current_thread().name == "kv-file-tier" and not estimates_s:
                node.clock.advance(2.0)
                estimates_s.append(node.estimate_s(9))

        node.pace.in_rest = look
        node.it.store(1, 2)
        node.it.wait_until(lambda: bool(estimates_s))
        assert estimates_s == [pytest.approx(READ_S)]


def test_one_slow_load_does_not_dominate_the_estimate() -> None:
    with decoding_node() as node:
        node.it.store(0)
        node.copies.block_s = 500 * COPY_S
        node.it.load([0], into=31)
        assert node.estimate_s(0) < 2 * COPY_S


def test_the_effect_of_slow_loads_on_the_estimate_decays() -> None:
    with decoding_node() as node:
        node.it.store(0)
        node.copies.block_s = 500 * COPY_S
        for _ in range(30):
            node.it.load([0], into=31)
        assert node.estimate_s(0) > 300 * COPY_S
        node.clock.advance(5 * HALF_LIFE_S)
        assert node.estimate_s(0) < 1.5 * COPY_S
