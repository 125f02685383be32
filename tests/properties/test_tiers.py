"""Tiers of two nodes that share files and objects, under random use, damage and restarts.

The KV caches are in memory of the CPU, or of simulated devices whose passes and copies land late.

Blocks belong to several tenants, and stores fail before, during and after their changes. A load
returns the right bytes or a miss, never wrong bytes, not those of a dropped block either, and a
node finds what it has just stored. Limits hold, and no slot of host memory is lost.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from enum import Enum
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, tenant_of
from baton.kv_transfer.external_kv import HOST, ExternalOrders, Use
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.objects.object_store import ObjectStore
from baton.kv_transfer.tiers.tier_status import PAUSE_S
from tests.support.block_stores import STORED_BYTES, FolderWorld, ObjectWorld, StoreWorld
from tests.support.device_kv import DeviceMemory
from tests.support.hypothesis_profiles import num_examples
from tests.support.memory_objects import FaultyObjects, MemoryObjects
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory, name_of
from tests.support.tier_world import (
    NUM_KV_BLOCKS,
    WAIT_S,
    FaultyStore,
    KvMemory,
    TierWorld,
    tier_world,
)

NUM_NAMES = 8  # the others of the KV memory are to load into
NUM_HOST = 4
MAX_FILES, MAX_OBJECTS = 5, 6
TENANT_SHARE = 0.5
MAX_OF_TENANT = 2  # in the smallest tier
HINTS = [BlockHints(tenant_of(salt)) for salt in ("", "", "", "", "a", "a", "a", "b")]  # by block


class Fault(Enum):
    """Moment at which an operation of a store fails."""

    BEFORE = "before its change"
    DURING = "during its change"
    AFTER = "after its change"
    DELETES = "only if it deletes what is there"


nodes = st.integers(0, 1)
faults = st.sampled_from(Fault)
# With most faults a store deletes the block nevertheless, or does not begin to.
faults_of_drops = st.sampled_from([Fault.DELETES, Fault.DELETES, *Fault])
FILES, OBJECTS = 0, 1
stores = st.sampled_from([FILES, OBJECTS])
blocks = st.integers(0, NUM_NAMES - 1)
salted = st.sampled_from([block for block, hints in enumerate(HINTS) if hints.tenant != SHARED])
some_blocks = st.lists(blocks, min_size=1, max_size=NUM_HOST, unique=True)
many_blocks = st.lists(blocks, min_size=1, max_size=NUM_NAMES, unique=True)


class Node:
    """Tiers of one process, whose stores fail on order."""

    def __init__(self, folder: Path, objects: MemoryObjects, memory: KvMemory) -> None:
        files = FileStore(str(folder), "model", BLOCK_BYTES, MAX_FILES * STORED_BYTES, TENANT_SHARE)
        self.objects = FaultyObjects(objects)
        limits = (BLOCK_BYTES, MAX_OBJECTS * STORED_BYTES, TENANT_SHARE)
        bucket = ObjectStore(self.objects, "model", *limits, clock=lambda: 2000.0)
        self.stores = (FaultyStore(files), FaultyStore(bucket))
        self.faults: dict[int, Fault] = {}  # by store
        self._removed: tuple[set[bytes], set[bytes]] = (set(), set())  # names, by store
        self._used: tuple[set[bytes], set[bytes]] = (set(), set())
        self._has_reached = Event()
        for number, store in enumerate(self.stores):
            store.before = partial(self._begin, number)
            store.after = partial(self._end, number)
            store.used = partial(self._note_use, number)
        self._stack = ExitStack()
        world = tier_world(NUM_HOST, *self.stores, tenant_share=TENANT_SHARE, memory=memory)
        self.world: TierWorld = self._stack.enter_context(world)
        self._sentinels = (b"sentinel %d" % number for number in count())

    def _begin(self, number: int, operation: str, name: bytes) -> None:
        if operation == "remove":
            self._removed[number].add(name)
            self._has_reached.set()
        if self.faults.get(number) is Fault.BEFORE and operation != "hints":
            raise OSError("failed before a change")

    def _end(self, number: int, _operation: str, _name: bytes) -> None:
        if self.faults.get(number) is Fault.AFTER:
            raise OSError("failed after a change")

    def _note_use(self, number: int, names: Sequence[bytes]) -> None:
        self._used[number].update(names)
        self._has_reached.set()

    def settle(self) -> None:
        """Wait until all writes and drops so far were tried, and carried out by stores that work.

        Names that nobody stores follow them through the tiers: a use is not kept for later when a
        store is broken, but a drop is.
        """
        name = next(self._sentinels)
        use = Use((name,), NO_HINTS)
        self.world.tiers.start(ExternalOrders(drops=(name,), uses=(use,)))
        working = [names for number, names in enumerate(self._removed) if number not in self.faults]
        while not all(name in names for names in (*self._used, *working)):
            assert self._has_reached.wait(WAIT_S), "the tiers hang"
            self._has_reached.clear()

    def close(self) -> None:
        self._stack.close()


class TwoNodes(RuleBasedStateMachine):
    memory: type[OwnedMemory | DeviceMemory] = OwnedMemory

    @initialize()
    def start(self) -> None:
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
        self.objects = MemoryObjects()
        self.nodes = [self._start(), self._start()]
        self.outside: tuple[StoreWorld, StoreWorld] = (
            FolderWorld(self.folder),
            ObjectWorld(self.objects, self.objects.content, self.objects),
        )
        self.without_deletes = self.stack.enter_context(ExitStack())
        # Blocks that a node has dropped and could not delete: others may still load them.
        self.undeleted: dict[int, set[int]] = {}  # the nodes, by block

    def _start(self) -> Node:
        return Node(self.folder, self.objects, self.memory(NUM_KV_BLOCKS))

    def teardown(self) -> None:
        if hasattr(self, "nodes"):
            for node in self.nodes:
                node.close()
            self.stack.close()

    # --- nodes -----------------------------------------------------------------------------

    @rule(node=nodes, wanted=some_blocks)
    def store_and_load(self, node: int, wanted: list[int]) -> None:
        wanted = self._not_of_others(node, wanted)
        if not wanted:
            return
        self._settle()  # nothing else is written meanwhile, and evicts what is stored now
        it = self.nodes[node]
        host = it.world.counters(HOST)
        num_skipped = host.num_skipped_stores
        # Of those that are in host memory already, a store may evict some. While files fail, only
        # objects are behind host memory, and skip blocks when too many wait to be written.
        are_kept = (
            not any(it.world.host.holds(name_of(block)) for block in wanted)
            and not any(FILES in each.faults for each in self.nodes)
            and _num_of_one_tenant(wanted) <= MAX_OF_TENANT
        )
        it.world.store(*wanted, hints=[HINTS[block] for block in wanted])
        sources = self._load(it, wanted)
        if host.num_skipped_stores == num_skipped:  # no file operation took long
            assert sources[-1] == HOST
            assert not are_kept or None not in sources

    @rule(node=nodes, wanted=many_blocks)
    def load(self, node: int, wanted: list[int]) -> None:
        wanted = self._not_of_others(node, wanted)
        if wanted:
            self._load(self.nodes[node], wanted)

    @rule(
        node=nodes,
        block=blocks,
        broken=st.none() | st.tuples(stores, faults),
        num_more=st.integers(0, 2),
    )
    def store_wrong_and_drop(
        self, node: int, block: int, broken: tuple[int, Fault] | None, num_more: int = 0
    ) -> None:
        """The pass that computed the block failed after it was stored, and then a store.

        It was tried again, and failed again.
        """
        self._settle()
        it = self.nodes[node]
        right = it.world.memory[block]
        it.world.memory.write(block, self._wrong(block))
        it.world.store(block, hints=HINTS[block])
        if broken is not None:
            self.break_store(node, *broken)
        it.world.drop(block)
        for _ in range(num_more):
            it.world.store(block, hints=HINTS[block])
            it.world.drop(block)
        it.world.memory.write(block, right)
        assert self._load(it, [block]) == (None,)
        it.settle()
        if it.faults:
            self.undeleted.setdefault(block, set()).add(node)

    @rule(node=nodes, block=salted | blocks, store=stores, fault=faults_of_drops)
    def drop_and_repair(self, node: int, block: int, store: int, fault: Fault) -> None:
        """A drop that failed is made up for: neither this process nor the next loads the block."""
        self.repair_all()
        self.store_wrong_and_drop(node, block, (store, fault))
        self.repair_all()
        assert not any(block in _numbers(outside) for outside in self.outside)
        assert self._load(self.nodes[node], [block]) == (None,)
        self.restart(node)
        assert self._load(self.nodes[node], [block]) == (None,)

    @rule(node=nodes)
    def clear(self, node: int) -> None:
        self._settle()
        it = self.nodes[node]
        it.world.tiers.clear()
        assert self._load(it, list(range(NUM_NAMES))) == (None,) * NUM_NAMES
        it.settle()
        assert it.faults or not any(store.stored() for store in self.outside)

    @precondition(lambda self: not any(node.faults for node in self.nodes))
    @rule(node=nodes, wanted=some_blocks)
    def clear_while_another_node_stores(self, node: int, wanted: list[int]) -> None:
        self._settle()
        self.nodes[node].world.tiers.clear()
        self.nodes[1 - node].world.store(*wanted, hints=[HINTS[block] for block in wanted])
        for _ in range(2):  # the second time, they learn what others published the first time
            self._settle()
        for it in self.nodes:
            for store, outside in zip(it.stores, self.outside, strict=True):
                assert all(store.holds(name_of(number)) for number in _numbers(outside))

    @rule(node=nodes)
    def restart(self, node: int) -> None:
        if self.undeleted or self._is_folder_broken:
            self.repair_all()  # a node that ends before forgets its drops
        self._settle()
        self.nodes[node].close()
        self.nodes[node] = again = self._start()
        files, _ = self.outside
        assert len(files.stored()) <= MAX_FILES
        for store, outside in zip(again.stores, self.outside, strict=True):
            for number in _numbers(outside):
                is_whole = len(outside.read(number)) == STORED_BYTES
                assert store.holds(name_of(number)) or not is_whole
        self._load(again, list(range(NUM_NAMES)))

    @rule(node=nodes, store=stores, fault=faults)
    def break_store(self, node: int, store: int, fault: Fault) -> None:
        self._settle()
        it = self.nodes[node]
        if store in it.faults:
            return
        if fault in (Fault.BEFORE, Fault.AFTER):
            it.faults[store] = fault
        elif store == OBJECTS:
            it.faults[store] = fault
            it.objects.is_failing = fault is Fault.DURING
            it.objects.has_deletes = fault is not Fault.DELETES
        else:
            self._break_folder(fault)

    def _break_folder(self, fault: Fault) -> None:
        """Break the folder of both nodes."""
        if fault is Fault.DURING:
            self._block_journals()
        else:
            self.without_deletes.enter_context(self.outside[FILES].without_deletes())
        for each in self.nodes:
            each.faults[FILES] = fault

    def _block_journals(self) -> None:
        """Let the folder take files of blocks, but no notes about them."""
        (journals,) = self.folder.glob("*/journals")
        journals.rename(self._blocked)
        while not journals.is_file():
            shutil.rmtree(journals, ignore_errors=True)  # a node has made it meanwhile
            with suppress(IsADirectoryError):
                journals.touch()

    @property
    def _is_folder_broken(self) -> bool:
        return any(it.faults.get(FILES) in (Fault.DURING, Fault.DELETES) for it in self.nodes)

    @property
    def _blocked(self) -> Path:
        return self.folder / "journals"

    @precondition(lambda self: any(node.faults for node in self.nodes))
    @rule()
    def repair_all(self) -> None:
        self._settle()
        if self._blocked.exists():
            (journals,) = self.folder.glob("*/journals")
            journals.unlink()
            self._blocked.rename(journals)
        self.without_deletes.close()
        for it in self.nodes:
            it.faults.clear()
            it.objects.is_failing, it.objects.has_deletes = False, True
        for _ in range(2):  # what failed meanwhile began another pause
            for it in self.nodes:
                it.world.clock.advance(PAUSE_S)
            self._settle()
        for outside in self.outside:
            for number in self.undeleted.keys() & set(_numbers(outside)):
                assert not outside.read(number).endswith(self._wrong(number))
        self.undeleted.clear()

    def _wrong(self, block: int) -> bytes:
        """Return what a pass that fails computes."""
        content = bytearray(self.nodes[0].world.memory[block])
        content[9] ^= 1
        return bytes(content)

    def _settle(self) -> None:
        for it in self.nodes:
            it.settle()

    def _not_of_others(self, node: int, wanted: list[int]) -> list[int]:
        """Return the blocks that no other node has failed to delete."""
        return [block for block in wanted if not self.undeleted.get(block, set()) - {node}]

    # --- damage from outside -----------------------------------------------------------------

    @rule(store=stores, number=blocks, damage=st.sampled_from(["flip", "cut", "delete", "swap"]))
    def damage(self, store: int, number: int, damage: str) -> None:
        self._settle()  # nothing is written meanwhile
        if store == FILES and self._is_folder_broken:
            return
        outside = self.outside[store]
        names = sorted(outside.stored())
        if not names:
            return
        block, other = (_number_of(names[(number + more) % len(names)]) for more in (0, 1))
        content = outside.read(block)
        if damage == "flip" and len(content) >= 5:
            outside.write(block, content[:-5] + bytes((content[-5] ^ 1,)) + content[-4:])
        elif damage == "cut":
            outside.write(block, content[: number * 500])
        elif damage == "delete":
            outside.delete(block)
        elif damage == "swap":
            outside.write(block, outside.read(other))

    # --- what must hold ------------------------------------------------------------------------

    @invariant()
    def limits_hold(self) -> None:
        for it in getattr(self, "nodes", ()):
            assert len(it.world.host.order) <= NUM_HOST

    def _load(self, it: Node, wanted: list[int]) -> tuple[str | None, ...]:
        """Load blocks. `TierWorld.load` verifies their bytes."""
        for number in range(NUM_NAMES, 2 * NUM_NAMES):
            it.world.memory.wipe(number)
        return it.world.load(wanted, into=NUM_NAMES)


def _number_of(stored: str) -> int:
    return int(stored.partition("-")[0], 16)


def _numbers(outside: StoreWorld) -> list[int]:
    return list(map(_number_of, outside.stored()))


def _num_of_one_tenant(wanted: list[int]) -> int:
    tenants = Counter(HINTS[block].tenant for block in wanted)
    return max((number for tenant, number in tenants.items() if tenant != SHARED), default=0)


def test_loads_are_correct_or_miss_under_any_faults() -> None:
    run_state_machine_as_test(
        TwoNodes,
        settings=settings(max_examples=num_examples(50), stateful_step_count=30),
    )


class TwoDeviceNodes(TwoNodes):
    memory = DeviceMemory


def test_loads_into_devices_are_correct_or_miss_under_any_faults() -> None:
    run_state_machine_as_test(
        TwoDeviceNodes,
        settings=settings(max_examples=num_examples(15), stateful_step_count=30),
    )
