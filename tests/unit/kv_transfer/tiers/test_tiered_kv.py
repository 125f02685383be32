from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, current_thread

import pytest

from baton.core.ids import BlockId
from baton.core.kv_hints import NO_HINTS, BlockHints, tenant_of
from baton.kv_transfer.external_kv import FILE, HOST, OBJECT, ExternalOrders, Store, StoreId
from baton.kv_transfer.tiers import host_stores, tiered_kv
from baton.kv_transfer.tiers.backing_tier import LOAD_DEADLINE_S
from baton.kv_transfer.tiers.copy_pace import CopyPace, PacedWork
from baton.kv_transfer.tiers.host_stores import MIN_AT_QUOTA
from baton.kv_transfer.tiers.kv_access import BlockMemory, copy_blocks
from baton.kv_transfer.tiers.stores.block_store import BlockStore
from baton.kv_transfer.tiers.tier_status import PAUSE_S
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from tests.support import tier_world as tier_world_module
from tests.support.block_stores import FolderWorld, StoreWorld, memory_world, scan_all
from tests.support.device_kv import DeviceMemory
from tests.support.tier_memory import OwnedMemory, name_of
from tests.support.tier_world import WAIT_S, Failing, FaultyStore, Gate, TierWorld, tier_world

TENANT = BlockHints(tenant_of("a salt"))
DISK_FULL = OSError(28, "No space left on device")


@dataclass
class Backing:
    """One tier behind host memory, whose stored blocks outlive its worlds."""

    tier: str
    stores: StoreWorld

    def open(self) -> BlockStore:
        return self.stores.open()

    @contextmanager
    def world(
        self,
        num_host: int = 16,
        store: BlockStore | None = None,
        tenant_share: float = 1.0,
    ) -> Iterator[TierWorld]:
        opened = self.open() if store is None else store
        files, objects = (opened, None) if self.tier == FILE else (None, opened)
        with tier_world(num_host, files, objects, tenant_share=tenant_share) as it:
            yield it

    def names(self) -> set[str]:
        return self.stores.stored()


@pytest.fixture(autouse=True, params=[OwnedMemory, DeviceMemory], ids=["cpu", "device"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with a KV cache in memory of the CPU, and of a device."""
    monkeypatch.setattr(tier_world_module, "make_memory", request.param)


@pytest.fixture(params=[FILE, OBJECT])
def backing(request: pytest.FixtureRequest, tmp_path: Path) -> Backing:
    stores = FolderWorld(tmp_path) if request.param == FILE else memory_world()
    return Backing(request.param, stores)


@pytest.fixture
def files(tmp_path: Path) -> Backing:
    return Backing(FILE, FolderWorld(tmp_path))


@pytest.fixture
def objects() -> Backing:
    return Backing(OBJECT, memory_world())


def hexes(*blocks: int) -> set[str]:
    return {name_of(block).hex() for block in blocks}


# --- host memory alone -----------------------------------------------------------------------


def test_stored_blocks_are_loaded_from_host_memory() -> None:
    with tier_world() as it:
        it.store(1, 2)
        assert it.holds(2)
        assert it.load([1, 2], into=5) == (HOST, HOST)


def test_blocks_that_no_tier_has_are_reported() -> None:
    with tier_world() as it:
        it.store(1)
        assert not it.holds(3)
        assert it.load([1, 3], into=5) == (HOST, None)


def test_a_block_that_changed_in_host_memory_is_not_loaded() -> None:
    with tier_world() as it:
        it.store(1)
        block = it.host.pin(name_of(1))
        assert block is not None
        it.host.memory.view(block.slot)[7] ^= 1
        it.host.unpin(block)

        assert it.load([1], into=5) == (None,)
        assert not it.holds(1)


def test_an_exception_in_a_load_ends_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    with tier_world() as it:
        it.store(1)
        monkeypatch.setattr(TieredKv, "_copy_from_host", fail)
        assert it.load([1], into=5) == (None,)


@pytest.mark.parametrize("_memory", [OwnedMemory], indirect=True)  # whose copies a test can replace
def test_loads_precede_the_rest_of_a_long_store(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    is_copying, may_copy = Event(), Event()

    def copy(
        source: BlockMemory, blocks: Sequence[int], target: BlockMemory, into: Sequence[int]
    ) -> list[bytes]:
        copies.append(len(blocks))
        is_copying.set()
        assert may_copy.wait(WAIT_S)
        return copy_blocks(source, blocks, target, into)

    monkeypatch.setattr(host_stores, "COPY_BLOCKS", 3)
    with tier_world(copy=copy) as it:
        store = it.start_store(*range(8))
        assert is_copying.wait(WAIT_S)
        load = it.start_load([0], into=10)
        may_copy.set()
        assert it.end_of(load) == (HOST,)
        it.end_of_store(store)
    assert copies == [3, 1, 3, 2]


# --- one tier behind it ------------------------------------------------------------------------


def test_blocks_outlive_the_process_and_are_promoted(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2, 3)
    assert backing.names() == hexes(1, 2, 3)
    with backing.world() as it:
        assert it.holds(1)
        assert it.load([1], into=5) == (backing.tier,)
        it.memory.wipe(5)
        assert it.load([1], into=5) == (HOST,)
        assert it.counters(backing.tier).num_loaded == 1


def test_nodes_share_a_store(backing: Backing) -> None:
    with backing.world() as one, backing.world() as other:
        one.store(1)
        one.wait_until(lambda: bool(backing.names()))
        one.clock.advance(2.0)
        other.clock.advance(2.0)
        other.wait_until_held(1)
        assert other.load([1], into=5) == (backing.tier,)


def test_two_nodes_write_the_same_block_at_the_same_time(backing: Backing) -> None:
    stores = [FaultyStore(backing.open()) for _ in range(2)]
    gates = [Gate("write") for _ in range(2)]
    with backing.world(store=stores[0]) as one, backing.world(store=stores[1]) as other:
        for store, gate, it in zip(stores, gates, (one, other), strict=True):
            store.before = gate
            it.store(1)
            gate.wait_until_reached()
        for gate in gates:
            gate.open()
    with backing.world() as it:
        assert it.load([1], into=5) == (backing.tier,)
    assert backing.names() == hexes(1)


def test_one_load_reads_host_memory_and_the_next_tier(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1)
    with backing.world() as it:
        it.store(2)
        assert it.load([1, 2], into=5) == (backing.tier, HOST)


def test_cleared_tiers_are_empty(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1)
        it.tiers.clear()
        assert not it.holds(1)
        assert it.load([1], into=5) == (None,)
        it.store(2)
        it.wait_until_held(2)
        assert not it.holds(1)
    assert backing.names() == hexes(2)


@pytest.mark.parametrize("is_host", [True, False])
def test_a_single_tier_can_be_cleared(backing: Backing, is_host: bool) -> None:
    with backing.world() as it:
        it.store(1, 2)
    cleared, source = (HOST, backing.tier) if is_host else (backing.tier, HOST)
    with backing.world() as it:
        it.store(1, 2)
        assert it.tiers.clear([cleared]) == {cleared: 2}
        assert it.tiers.clear([]) == {}
        it.wait_until_held(2)
        assert it.load([1, 2], into=5) == (source, source)


def test_hints_reach_files_and_a_block_that_is_promoted_keeps_them(files: Backing) -> None:
    with files.world() as it:
        it.store(1, 2)
        it.use(1, hints=BlockHints(retain_s=3600.0))
    with files.world(num_host=4) as it:
        assert it.load([1, 2], into=5) == (FILE, FILE)
        assert (it.num_retained(HOST), it.num_retained(FILE)) == (1, 1)


def test_hints_reach_objects(objects: Backing) -> None:
    with objects.world() as it:
        it.store(1, hints=BlockHints(retain_s=3600.0))
        it.store(2)
        it.use(2, hints=BlockHints(retain_s=3600.0))
        it.wait_until(lambda: it.num_retained(OBJECT) == 2)


def test_a_second_store_of_a_block_applies_its_hints() -> None:
    with tier_world() as it:
        it.store(1)
        it.store(1, hints=BlockHints(retain_s=3600.0))
        assert it.num_retained(HOST) == 1


def test_resetting_one_tier_does_not_restore_blocks_that_another_failed_to_remove(
    backing: Backing,
) -> None:
    store, fault = FaultyStore(backing.open()), Failing(("clear",))
    store.before = fault
    with backing.world(store=store) as it:
        it.store(1)
        it.wait_until(lambda: bool(backing.names()))
        it.tiers.clear()
        it.wait_until(lambda: bool(fault.seen))
        it.tiers.clear([HOST])
        it.load([2], into=5)
        assert not it.holds(1)
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.wait_until(lambda: not backing.names())
        it.store(3)
        it.wait_until(lambda: bool(backing.names()))
        it.host.remove(name_of(3))
        it.wait_until_held(3)
        assert it.load([3], into=5) == (backing.tier,)


def test_a_write_in_progress_does_not_survive_a_clear(backing: Backing) -> None:
    store, gate = FaultyStore(backing.open()), Gate("write")
    store.before = gate
    with backing.world(store=store) as it:
        it.store(1, 2)
        gate.wait_until_reached()
        it.tiers.clear()
        gate.open()
    assert not backing.names()


def test_a_read_in_progress_does_not_survive_a_clear(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2)
    store, gate = FaultyStore(backing.open()), Gate("read")
    store.before = gate
    with backing.world(store=store) as it:
        number = it.start_load([1, 2], into=5)
        gate.wait_until_reached()
        it.tiers.clear()
        gate.open()
        it.end_of(number)
        it.store(3)
        it.wait_until_held(3)
        assert not it.host.holds(name_of(1))


@pytest.mark.parametrize("operation", ["read", "hints"])
def test_a_block_that_is_dropped_during_its_load_is_in_no_tier(
    backing: Backing, operation: str
) -> None:
    with backing.world() as it:
        it.store(1, hints=BlockHints(tenant_of("a salt")))
    store, gate = FaultyStore(backing.open()), Gate(operation)
    store.before = gate
    with backing.world(store=store) as it:
        number = it.start_load([1], into=5)
        gate.wait_until_reached()
        it.drop(1)
        it.load([9], into=6)  # ends after host memory has dropped the block
        gate.open()
        it.end_of(number)
        it.wait_until(lambda: not backing.names())
        assert not it.host.holds(name_of(1))
        assert it.load([1], into=5) == (None,)


def test_dropped_blocks_are_in_no_tier(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2)
        it.drop(1)
        assert not it.holds(1)
        assert it.load([1, 2], into=5) == (None, HOST)
    assert backing.names() == hexes(2)


def test_the_end_of_a_drop_does_not_lift_another_drop_of_the_block(backing: Backing) -> None:
    store, dropping, written = FaultyStore(backing.open()), Gate("remove"), Gate("write")
    store.before, store.after = dropping, written
    with backing.world(store=store) as it:
        it.drop(1)
        dropping.wait_until_reached()
        it.store(1)  # wrong again
        it.drop(1)
        dropping.open()
        written.wait_until_reached()
        assert not it.holds(1)
        number = it.start_load([1], into=5)
        it.load([9], into=6)  # ends after the load before it has been queued
        written.open()
        assert it.end_of(number) == (None,)
    assert not backing.names()


def test_a_dropped_store_that_waits_for_space_is_not_stored(files: Backing) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=1, store=store) as it:
        it.store(1)
        gate.wait_until_reached()
        number = it.start_store(2, 3)
        it.drop(2)
        it.load([4], into=5)  # ends after the drop has been carried out
        gate.open()
        it.end_of_store(number)
        assert not it.holds(2)
    assert files.names() == hexes(1, 3)


def test_stores_wait_for_files_while_host_memory_is_full(files: Backing) -> None:
    with files.world(num_host=2) as it:
        it.store(1, 2, 3, 4, 5)
    assert files.names() == hexes(1, 2, 3, 4, 5)
    with files.world(num_host=2) as it:
        assert it.load([1, 2, 3, 4, 5], into=6) == (FILE,) * 5
        assert len(it.host.order) == 2


def test_a_store_that_waits_for_space_continues_once_space_is_free(
    files: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv, "ROOM_RETRY_S", 100 * WAIT_S)
    with files.world(num_host=2) as it:
        it.store(*range(12))
    assert files.names() == hexes(*range(12))


def test_writes_that_a_store_waits_for_run_at_full_speed(files: Backing) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=2, store=store) as it:
        it.tiers.pace.set_decoding(True)
        number = it.start_store(1, 2, 3, 4)
        it.wait_until(lambda: not it.tiers.pace.is_limited)
        gate.open()
        it.end_of_store(number)
        it.wait_until(lambda: it.tiers.pace.is_limited)


def test_stores_of_a_tenant_at_its_quota_wait_for_files_and_delay_no_one_else(
    files: Backing,
) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=8, store=store, tenant_share=0.25) as it:
        it.tiers.pace.set_decoding(True)
        waiting = it.start_store(1, 2, 3, 4, hints=TENANT)
        gate.wait_until_reached()
        it.store(5)
        it.store(6, hints=BlockHints(tenant_of("another")))
        assert it.tiers.pace.is_limited
        assert [it.holds(block) for block in (1, 2, 3)] == [True, True, False]
        it.drop(3)
        gate.open()
        it.end_of_store(waiting)
        it.wait_until_held(4)
    assert {stem.partition("-")[0] for stem in files.names()} == hexes(1, 2, 4, 5, 6)


def test_tenants_take_turns_in_writes(files: Backing) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    written: list[bytes] = []
    store.before = gate
    store.after = lambda operation, name: written.append(name) if operation == "write" else None
    with files.world(num_host=16, store=store) as it:
        it.store(*range(5), hints=TENANT)
        gate.wait_until_reached()
        it.store(11, hints=BlockHints(tenant_of("another")))
        gate.open()
    # Block 0 is being written, and it is the turn of block 1.
    assert written == [*map(name_of, (0, 1, 11, 2, 3, 4))]


def test_a_store_waits_only_for_blocks_of_tenants_at_their_quota(files: Backing) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=8, store=store, tenant_share=0.25) as it:
        it.store(1, 2, hints=TENANT)
        gate.wait_until_reached()
        names = (name_of(3), name_of(4), name_of(5))
        order = Store(
            StoreId(99), names, tuple(map(BlockId, (3, 4, 5))), (NO_HINTS, TENANT, NO_HINTS)
        )
        it.tiers.start(ExternalOrders(stores=(order,)))
        it.wait_until_held(5)
        assert not it.holds(4)
        gate.open()
        it.end_of_store(99)
        assert it.holds(4)


def test_a_tenant_never_has_more_blocks_in_host_memory_than_its_quota() -> None:
    with tier_world(num_host=16, tenant_share=0.25) as it:
        it.store(*range(10), hints=TENANT)
        assert len(it.host.order) == 4


def test_of_a_tenant_at_its_quota_only_some_blocks_wait_in_the_kv_cache(files: Backing) -> None:
    """Otherwise, they would take all of what the scheduler lets be stored at a time."""
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=8, store=store, tenant_share=0.25) as it:
        number = it.start_store(*range(12), hints=TENANT)
        it.store(13)
        assert it.counters(HOST).num_skipped_stores == 12 - 2 - MIN_AT_QUOTA
        gate.open()
        it.end_of_store(number)
    assert len(files.names()) == 2 + MIN_AT_QUOTA + 1


def test_closing_the_node_writes_everything_despite_limited_copies(files: Backing) -> None:
    with files.world() as it:
        it.tiers.pace.set_decoding(True)
        it.start_store(1, 2)
    assert not it.tiers.pace.is_limited
    assert files.names() == hexes(1, 2)


def test_loads_stores_and_writes_have_separate_limits(
    files: Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: dict[str, list[tuple[PacedWork, float]]] = {}
    turn = CopyPace.turn

    def noting(
        pace: CopyPace, work: PacedWork, ordered_s: float, is_urgent: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        turns.setdefault(current_thread().name, []).append((work, ordered_s))
        return turn(pace, work, ordered_s, is_urgent)

    monkeypatch.setattr(CopyPace, "turn", noting)
    with files.world() as it:
        began_s = it.clock()
        it.store(1)
    with files.world() as it:
        it.load([1], into=5)
        it.load([1], into=6)

    assert [work for work, _ in turns["kv-host-tier"]] == [PacedWork.STORE, PacedWork.LOAD]
    assert [work for work, _ in turns["kv-file-tier"]] == [PacedWork.WRITE_BEHIND, PacedWork.LOAD]
    assert all(ordered_s >= began_s for each in turns.values() for _, ordered_s in each)


def test_stores_do_not_wait_for_objects(objects: Backing) -> None:
    store, gate = FaultyStore(objects.open()), Gate("write")
    store.before = gate
    with objects.world(num_host=4, store=store) as it:
        it.store(1)
        gate.wait_until_reached()
        it.store(2, 3, 4)
        assert it.counters(OBJECT).num_skipped_stores == 1  # two may wait: half of 4
        assert it.load([1, 2, 3, 4], into=8) == (HOST,) * 4
        gate.open()
    assert len(objects.names()) == 3


def test_a_damaged_file_is_loaded_from_the_object_store(files: Backing, objects: Backing) -> None:
    with tier_world(16, files.open(), objects.open()) as it:
        it.store(1, 2)
    files.stores.write(1, files.stores.read(1)[:-1])
    with tier_world(16, files.open(), objects.open()) as it:
        assert it.load([1, 2], into=5) == (OBJECT, FILE)
        assert it.counters(FILE).num_failed_loads == 1


def test_blocks_missing_in_files_are_loaded_from_the_object_store(
    files: Backing, objects: Backing
) -> None:
    with objects.world() as it:
        it.store(1, 2)
    with files.world() as it:
        it.store(2, 3)
    with tier_world(16, files.open(), objects.open()) as it:
        it.store(4)
        blocks = [1, 2, 3, 4, 5]
        assert it.load(blocks, into=8) == (OBJECT, FILE, FILE, HOST, None)


# --- faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [DISK_FULL, OSError(30, "Read-only file system"), OSError("unreachable")]
)
def test_an_unwritable_store_pauses_writes_and_fails_no_load(
    backing: Backing, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    store, fault = FaultyStore(backing.open()), Failing(("write",), error)
    store.before = fault
    with backing.world(store=store) as it:
        it.store(1)
        it.wait_until(lambda: it.counters(backing.tier).num_failed == 1)
        it.store(2, 3)  # not tried
        assert it.load([1, 2, 3], into=5) == (HOST, HOST, HOST)
        assert it.counters(backing.tier).num_failed == 3
        assert caplog.text.count(str(error)) == 1
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.store(4)
    assert backing.names() == hexes(4)
    assert fault.seen == ["write"]


def test_an_unreadable_store_is_not_queried_until_it_works(
    backing: Backing, caplog: pytest.LogCaptureFixture
) -> None:
    with backing.world() as it:
        it.store(1, 2)
    store, fault = FaultyStore(backing.open()), Failing()
    with backing.world(store=store) as it:
        store.before = fault
        assert it.load([1, 2], into=5) == (None, None)
        assert it.counters(backing.tier).num_failed_loads == 2
        assert not it.holds(1)
        it.clock.advance(PAUSE_S)
        it.wait_until(lambda: "refresh" in fault.seen)  # tries again, and fails
        assert not it.holds(1)
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.wait_until_held(2)
        sources = it.load([2], into=5)
        assert sources == (backing.tier,)
    assert caplog.text.count("Input/output error") == 1


def test_an_unreadable_file_costs_only_its_block(
    files: Backing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with files.world() as it:
        it.store(*range(6))
    [path] = tmp_path.glob(f"*/??/{name_of(2).hex()}.kv")
    path.unlink()
    path.mkdir()
    with files.world() as it:
        assert it.load([*range(6)], into=8) == (FILE, FILE, None, FILE, FILE, FILE)
        assert it.is_usable(FILE)
        assert not it.holds(2)
        assert it.counters(FILE).num_failed_loads == 1
    assert f"{name_of(2).hex()}.kv" in caplog.text


def test_a_node_starts_without_its_folder_and_uses_it_once_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = Backing(FILE, FolderWorld(tmp_path / "kv"))
    (tmp_path / "kv").touch()
    with files.world() as it:
        it.store(1)
        it.wait_until(lambda: it.counters(FILE).num_failed == 1)
        it.clock.advance(PAUSE_S)
        it.store(2)
        it.wait_until(lambda: it.counters(FILE).num_failed == 2)
        assert it.load([1, 2], into=5) == (HOST, HOST)
        assert not it.is_usable(FILE)
        (tmp_path / "kv").unlink()
        it.clock.advance(PAUSE_S)
        it.wait_until(lambda: it.is_usable(FILE))
        it.store(3)
    assert files.names() == hexes(3)
    assert caplog.text.count("Not a directory") == 2  # for loads and for stores


def test_a_node_starts_without_its_store_and_finds_its_blocks_later(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2, 3, 4, 5)
    store, fault = FaultyStore(backing.open()), Failing()
    store.before = fault
    with backing.world(store=store) as it:
        assert not it.holds(1)
        it.store(6)
        assert it.load([6], into=8) == (HOST,)
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.wait_until_held(5)
        assert it.load([5], into=8) == (backing.tier,)


@pytest.mark.parametrize("operation", ["remove", "clear"])
def test_blocks_that_cannot_be_removed_are_not_loaded_and_removed_later(
    backing: Backing, operation: str
) -> None:
    store, fault = FaultyStore(backing.open()), Failing((operation,))
    store.before = fault
    with backing.world(store=store) as it:
        it.store(1)
        it.wait_until(lambda: bool(backing.names()))
        if operation == "remove":
            it.drop(1)
        else:
            it.tiers.clear()
        it.wait_until(lambda: bool(fault.seen))
        assert not it.holds(1)
        assert it.load([1], into=5) == (None,)
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.wait_until(lambda: not backing.names())


@pytest.mark.parametrize("tenant", ["", "a salt"])
def test_a_dropped_block_whose_deletion_failed_is_not_found_after_a_restart(
    backing: Backing, tenant: str
) -> None:
    store = FaultyStore(backing.open())
    with backing.world(store=store) as it:
        it.store(1, hints=BlockHints(tenant_of(tenant)))
        it.wait_until(lambda: bool(backing.names()))
        with backing.stores.without_deletes():
            it.drop(1)
            it.wait_until(lambda: "remove" in store.failed)
        it.clock.advance(PAUSE_S)
        it.wait_until(lambda: not backing.names())
    with backing.world() as it:
        assert it.load([1], into=5) == (None,)


def test_stores_do_not_wait_for_a_stuck_disk(files: Backing) -> None:
    store, gate = FaultyStore(files.open()), Gate("write")
    store.before = gate
    with files.world(num_host=2, store=store) as it:
        it.store(1, 2)
        gate.wait_until_reached()
        it.clock.advance(10.0)
        it.store(3, 4)
        assert it.counters(HOST).num_skipped_stores == 2
        assert it.load([1, 2], into=6) == (HOST, HOST)
        gate.open()


def test_a_slow_store_raises_the_estimate_of_other_loads(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2)
    store, gate = FaultyStore(backing.open()), Gate("read")
    store.before = gate
    with backing.world(store=store) as it:
        number = it.start_load([1], into=5)
        gate.wait_until_reached()
        soon_s = it.tiers.load_s([name_of(2)])
        it.clock.advance(8.0)
        assert it.tiers.load_s([name_of(2)]) == pytest.approx(soon_s + 8.0, abs=4.0)
        gate.open()
        assert it.end_of(number) == (backing.tier,)


def test_a_slow_load_ends_at_its_deadline_with_what_it_has(files: Backing) -> None:
    with files.world() as it:
        it.store(1, 2, 3)
    store, gate = FaultyStore(files.open()), Gate("read")
    store.before = gate
    with files.world(store=store) as it:
        number = it.start_load([1, 2, 3], into=5)
        gate.wait_until_reached()
        it.clock.advance(LOAD_DEADLINE_S + 1.0)
        gate.open()
        assert it.end_of(number) == (FILE, None, None)
        assert it.load([2, 3], into=8) == (FILE, FILE)


def test_blocks_that_are_evicted_during_a_load_are_misses(backing: Backing) -> None:
    with backing.world() as it:
        it.store(1, 2, 3)
    store, gate = FaultyStore(backing.open()), Gate("read")
    store.before = gate
    with backing.world(store=store) as it:
        number = it.start_load([1, 2, 3], into=5)
        gate.wait_until_reached()
        scan_all(backing.open()).remove(name_of(2))  # by another process
        gate.open()
        assert it.end_of(number) == (backing.tier, None, backing.tier)


def test_loads_precede_writes(backing: Backing) -> None:
    with backing.world() as it:
        it.store(9)
    store, gate = FaultyStore(backing.open()), Gate("write")
    seen: list[str] = []

    def note(operation: str, name: bytes) -> None:
        seen.append(operation)
        gate(operation, name)

    store.before = note
    with backing.world(num_host=16, store=store) as it:
        it.store(1)
        gate.wait_until_reached()
        it.store(2, 3, 4)
        number = it.start_load([9], into=10)
        it.wait_until(lambda: it.tiers.load_s([name_of(9)]) > 0)
        it.load([1], into=11)  # ends after the load before it has been queued
        gate.open()
        assert it.end_of(number) == (backing.tier,)
    changes = [each for each in seen if each in ("read", "write")]
    assert changes == ["write", "read", "write", "write", "write"]


def test_a_node_closes_although_its_store_fails(backing: Backing) -> None:
    store, fault = FaultyStore(backing.open()), Failing()
    store.before = fault
    with backing.world(store=store) as it:
        it.store(1, 2, 3)
        it.drop(1)
        it.tiers.clear()
        it.store(4)
    assert not backing.names()


@pytest.mark.parametrize("operation", ["scan", "write", "refresh"])
def test_a_bug_in_a_store_ends_neither_its_tier_nor_a_pin(
    backing: Backing, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, fault = FaultyStore(backing.open()), Failing((operation,), RuntimeError("a bug"))
    store.before = fault
    with backing.world(store=store) as it:
        it.store(1, 2)
        it.wait_until(lambda: bool(fault.seen))
        fault.is_repaired = True
        it.clock.advance(PAUSE_S)
        it.store(3)
    assert hexes(3) <= backing.names()
    assert "a bug" in caplog.text
