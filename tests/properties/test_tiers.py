"""Tiers of two nodes that share files and objects, under random use, damage and restarts.

A load returns the right bytes or a miss, never wrong bytes, and a node finds what it has just
stored. Limits hold, and no slot of host memory is lost.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
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

from kv_transfer.external_kv import HOST, ExternalOrders
from kv_transfer.tiers.backing_tier import PAUSE_S
from kv_transfer.tiers.file_tier import FileTier
from kv_transfer.tiers.object_tier import ObjectTier
from tests.support.block_stores import STORED_BYTES, FolderWorld, ObjectWorld, StoreWorld
from tests.support.hypothesis_profiles import num_examples
from tests.support.memory_objects import MemoryObjects
from tests.support.tier_memory import BLOCK_BYTES, name_of
from tests.support.tier_world import WAIT_S, FaultyStore, TierWorld, tier_world

NUM_NAMES = 8  # the others of the KV memory are to load into
NUM_HOST = 4
MAX_FILES, MAX_OBJECTS = 5, 6

nodes = st.integers(0, 1)
FILES, OBJECTS = 0, 1
stores = st.sampled_from([FILES, OBJECTS])
blocks = st.integers(0, NUM_NAMES - 1)
some_blocks = st.lists(blocks, min_size=1, max_size=NUM_HOST, unique=True)
many_blocks = st.lists(blocks, min_size=1, max_size=NUM_NAMES, unique=True)


class Node:
    """Tiers of one process, whose stores fail on order."""

    def __init__(self, folder: Path, objects: MemoryObjects) -> None:
        files = FileTier(str(folder), "model", BLOCK_BYTES, MAX_FILES * STORED_BYTES)
        limit = MAX_OBJECTS * STORED_BYTES
        bucket = ObjectTier(objects, "model", BLOCK_BYTES, limit, clock=lambda: 2000.0)
        self.stores = (FaultyStore(files), FaultyStore(bucket))
        self.broken: set[int] = set()
        self._seen: tuple[set[bytes], set[bytes]] = (set(), set())
        self._removed = Event()
        for number, store in enumerate(self.stores):
            store.before = lambda operation, name, number=number: self._note(  # type: ignore[misc]
                number, operation, name
            )
        self._stack = ExitStack()
        self.world: TierWorld = self._stack.enter_context(tier_world(NUM_HOST, *self.stores))
        self._sentinels = (b"sentinel %d" % number for number in count())

    def _note(self, number: int, operation: str, name: bytes) -> None:
        if operation == "remove":
            self._seen[number].add(name)
            self._removed.set()
        if number in self.broken:
            raise OSError("broken")

    def settle(self) -> None:
        """Wait until stores that work have carried out all writes and drops so far."""
        sentinel = next(self._sentinels)
        self.world.tiers.start(ExternalOrders(drops=(sentinel,)))
        working = [seen for number, seen in enumerate(self._seen) if number not in self.broken]
        while not all(sentinel in seen for seen in working):
            assert self._removed.wait(WAIT_S), "the tiers hang"
            self._removed.clear()

    def close(self) -> None:
        self._stack.close()


class TwoNodes(RuleBasedStateMachine):
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

    def _start(self) -> Node:
        return Node(self.folder, self.objects)

    def teardown(self) -> None:
        if hasattr(self, "nodes"):
            for node in self.nodes:
                node.close()
            self.stack.close()

    # --- nodes -----------------------------------------------------------------------------

    @rule(node=nodes, wanted=some_blocks)
    def store_and_load(self, node: int, wanted: list[int]) -> None:
        for each in self.nodes:
            each.settle()  # nothing else is written meanwhile, and evicts what is stored now
        it = self.nodes[node]
        # Of those that are in host memory already, a store may evict some. While files fail, only
        # objects are behind host memory, and skip blocks when too many wait to be written.
        are_kept = not any(it.world.host.holds(name_of(block)) for block in wanted)
        are_kept = are_kept and not any(FILES in each.broken for each in self.nodes)
        it.world.store(*wanted)
        sources = self._load(it, wanted)
        assert sources[-1] == HOST
        assert not are_kept or None not in sources

    @rule(node=nodes, wanted=many_blocks)
    def load(self, node: int, wanted: list[int]) -> None:
        self._load(self.nodes[node], wanted)

    @rule(node=nodes, block=blocks)
    def store_wrong_and_drop(self, node: int, block: int) -> None:
        """The pass that computed the block failed after it was stored."""
        it = self.nodes[node]
        if not it.broken:
            it.world.memory.blocks.view(block)[9] ^= 1
            it.world.store(block)
            it.world.drop(block)
            it.world.memory.blocks.view(block)[9] ^= 1
            assert self._load(it, [block]) == (None,)
            it.settle()

    @rule(node=nodes)
    def clear(self, node: int) -> None:
        for it in self.nodes:
            it.settle()
        it = self.nodes[node]
        it.world.tiers.clear()
        assert self._load(it, list(range(NUM_NAMES))) == (None,) * NUM_NAMES
        it.settle()
        assert it.broken or not any(store.stored() for store in self.outside)

    @rule(node=nodes)
    def restart(self, node: int) -> None:
        for it in self.nodes:
            it.settle()
        self.nodes[node].close()
        self.nodes[node] = again = self._start()
        files, _ = self.outside
        assert len(files.stored()) <= MAX_FILES
        for store, outside in zip(again.stores, self.outside, strict=True):
            for name in outside.stored():
                is_whole = len(outside.read(int(name, 16))) == STORED_BYTES
                assert store.holds(bytes.fromhex(name)) or not is_whole

    @rule(node=nodes, store=stores)
    def break_store(self, node: int, store: int) -> None:
        self.nodes[node].settle()
        self.nodes[node].broken.add(store)

    @precondition(lambda self: any(node.broken for node in self.nodes))
    @rule()
    def repair_all(self) -> None:
        for it in self.nodes:
            it.broken.clear()
            for _ in range(2):  # what failed meanwhile began another pause
                it.world.clock.advance(PAUSE_S)
                it.settle()

    # --- damage from outside -----------------------------------------------------------------

    @rule(store=stores, number=blocks, damage=st.sampled_from(["flip", "cut", "delete", "swap"]))
    def damage(self, store: int, number: int, damage: str) -> None:
        for it in self.nodes:
            it.settle()  # nothing is written meanwhile
        outside = self.outside[store]
        names = sorted(outside.stored())
        if not names:
            return
        block, other = (int(names[(number + more) % len(names)], 16) for more in (0, 1))
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
            assert len(it.world.host) <= NUM_HOST

    def _load(self, it: Node, wanted: list[int]) -> tuple[str | None, ...]:
        """Load blocks. `TierWorld.load` verifies their bytes."""
        for number in range(NUM_NAMES, 2 * NUM_NAMES):
            it.world.memory.wipe(number)
        return it.world.load(wanted, into=NUM_NAMES)


def test_loads_are_right_or_miss_whatever_happens() -> None:
    run_state_machine_as_test(
        TwoNodes,
        settings=settings(max_examples=num_examples(50), stateful_step_count=30),
    )
