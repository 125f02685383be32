"""Tiers with KV memory and faults, and an engine that waits for their reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event
from typing import Protocol

from baton.core.ids import BlockId
from baton.core.kv_hints import NO_HINTS, BlockHints
from baton.kv_transfer.external_kv import ExternalOrders, Load, LoadId, Store, StoreId, Use
from baton.kv_transfer.tiers.copy_pace import CopyPace
from baton.kv_transfer.tiers.host_tier import HostTier
from baton.kv_transfer.tiers.kv_access import BlockMemory, CopyBlocks, KvAccess, copy_blocks
from baton.kv_transfer.tiers.stores.block_store import BlockStore
from baton.kv_transfer.tiers.stores.objects.object_store import OBJECTS
from baton.kv_transfer.tiers.stores.store_kinds import FILES
from baton.kv_transfer.tiers.tier_status import TierCounters, TierStatus
from baton.kv_transfer.tiers.tiered_kv import TieredKv
from tests.support.tier_memory import OwnedMemory, host_tier_in, name_of
from tests.support.waits import await_value

WAIT_S = 30.0
NUM_KV_BLOCKS = 16
REFRESH_S = 0.01  # of objects

make_memory: Callable[[int], KvMemory] = OwnedMemory  # tests can replace it


class TierClock(Protocol):
    def __call__(self) -> float: ...

    def advance(self, seconds: float) -> None: ...


class KvMemory(Protocol):
    """KV cache of a world, and what a pass does with it."""

    def __getitem__(self, block: int) -> bytes: ...

    def write(self, block: int, content: bytes) -> None: ...

    def wipe(self, block: int) -> None: ...

    def kv_access(self, host: OwnedMemory, copy: CopyBlocks = copy_blocks) -> KvAccess: ...

    def check(self) -> None: ...


class Clock:
    """Real time, which tests advance."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds


def _no_fault(_operation: str, _name: bytes) -> None:
    pass


class FaultyStore(BlockStore):
    """A block store that fails or waits on order.

    `before` and `after` are called with each operation and name, before and after its change: they
    may wait or raise. `used` is called with the names of each use.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store, self.order, self.stored_bytes = store, store.order, store.stored_bytes
        self.before: Callable[[str, bytes], None] = _no_fault
        self.after: Callable[[str, bytes], None] = _no_fault
        self.used: Callable[[Sequence[bytes]], None] = lambda _: None
        self.failed: list[str] = []  # operations

    @contextmanager
    def _operation(self, operation: str, name: bytes = b"") -> Iterator[None]:
        try:
            self.before(operation, name)
            yield
            self.after(operation, name)
        except OSError:
            self.failed.append(operation)
            raise

    def holds(self, name: bytes) -> bool:
        return self.store.holds(name)

    def hints_of(self, name: bytes) -> BlockHints:
        self.before("hints", name)
        return self.store.hints_of(name)

    def scan(self) -> bool:
        with self._operation("scan"):
            return self.store.scan()

    def refresh(self) -> None:
        with self._operation("refresh"):
            self.store.refresh()

    def read(self, name: bytes, memory: BlockMemory, block: int) -> bytes | None:
        with self._operation("read", name):
            return self.store.read(name, memory, block)

    def write(
        self,
        name: bytes,
        memory: BlockMemory,
        block: int,
        digest: bytes,
        hints: BlockHints = NO_HINTS,
    ) -> None:
        with self._operation("write", name):
            self.store.write(name, memory, block, digest, hints)

    def use(self, names: Iterable[bytes], hints: BlockHints) -> None:
        names = tuple(names)
        self.store.use(names, hints)
        self.used(names)

    def remove(self, name: bytes) -> None:
        with self._operation("remove", name):
            self.store.remove(name)

    def clear(self) -> None:
        with self._operation("clear"):
            self.store.clear()

    def close(self) -> None:
        self.store.close()


@dataclass
class Gate:
    """Fault that makes one kind of operation wait until the test opens the gate."""

    operation: str

    def __post_init__(self) -> None:
        self.reached, self._opened = Event(), Event()

    def __call__(self, operation: str, _name: bytes) -> None:
        if operation == self.operation:
            self.reached.set()
            assert self._opened.wait(WAIT_S), "the gate was not opened"

    def wait_until_reached(self) -> None:
        assert self.reached.wait(WAIT_S), f"there was no {self.operation}"

    def open(self) -> None:
        self._opened.set()


@dataclass
class Failing:
    """Fault that fails the named operations, or all, until it is repaired."""

    operations: Sequence[str] = ()
    error: Exception = OSError(5, "Input/output error")

    def __post_init__(self) -> None:
        self.seen: list[str] = []
        self.is_repaired = False

    def __call__(self, operation: str, _name: bytes) -> None:
        if operation == "hints":
            return  # memory alone
        if not self.is_repaired and (not self.operations or operation in self.operations):
            self.seen.append(operation)
            raise self.error


class TierWorld:
    def __init__(
        self,
        tiers: TieredKv,
        memory: KvMemory,
        host: HostTier,
        clock: TierClock,
        woken: Event,  # by the tiers
    ) -> None:
        self.tiers = tiers
        self.memory = memory
        self.host = host
        self.clock = clock
        self.sources: dict[int, tuple[str | None, ...]] = {}
        self._stored: set[int] = set()
        self._woken = woken
        self._number = 0

    def store(self, *blocks: int, hints: BlockHints | Sequence[BlockHints] = NO_HINTS) -> None:
        self.end_of_store(self.start_store(*blocks, hints=hints))

    def start_store(self, *blocks: int, hints: BlockHints | Sequence[BlockHints] = NO_HINTS) -> int:
        """Order a store with the same hints for all blocks, or hints for each."""
        self._number += 1
        names = tuple(name_of(block) for block in blocks)
        block_ids = tuple(map(BlockId, blocks))
        all_hints = (hints,) * len(names) if isinstance(hints, BlockHints) else tuple(hints)
        store = Store(StoreId(self._number), names, block_ids, all_hints)
        self.tiers.start(ExternalOrders(stores=(store,)))
        return self._number

    def use(self, *blocks: int, hints: BlockHints = NO_HINTS) -> None:
        names = tuple(name_of(block) for block in blocks)
        self.tiers.start(ExternalOrders(uses=(Use(names, hints),)))

    def end_of_store(self, number: int) -> None:
        self._wait_for(number, self._stored)

    def load(self, blocks: Sequence[int], into: int) -> tuple[str | None, ...]:
        """Load blocks. What was loaded must be right."""
        sources = self.end_of(self.start_load(blocks, into))
        for place, (block, source) in enumerate(zip(blocks, sources, strict=True)):
            assert source is None or self.memory[into + place] == self.memory[block]
        return sources

    def start_load(self, blocks: Sequence[int], into: int) -> int:
        self._number += 1
        names = tuple(name_of(block) for block in blocks)
        targets = tuple(BlockId(into + place) for place in range(len(blocks)))
        load = Load(LoadId(self._number), names, targets)
        self.tiers.start(ExternalOrders(loads=(load,)))
        return self._number

    def end_of(self, number: int) -> tuple[str | None, ...]:
        self._wait_for(number, self.sources)
        return self.sources[number]

    def drop(self, *blocks: int) -> None:
        self.tiers.start(ExternalOrders(drops=tuple(name_of(block) for block in blocks)))

    def holds(self, block: int) -> bool:
        return self.tiers.holds(name_of(block))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a thread of the tiers. No event reports that."""
        await_value(is_so)

    def wait_until_held(self, block: int) -> None:
        self.wait_until(lambda: self.holds(block))

    def counters(self, tier: str) -> TierCounters:
        return self._status(tier).counters

    def is_usable(self, tier: str) -> bool:
        return self._status(tier).is_usable

    def num_retained(self, tier: str) -> int:
        return self._status(tier).order.num_retained

    def _status(self, tier: str) -> TierStatus:
        (status,) = (each for each in self.tiers.status() if each.name == tier)
        return status

    def _wait_for(self, number: int, ended: Container[int]) -> None:
        while number not in ended:
            assert self._woken.wait(WAIT_S), "nothing was reported"
            self._woken.clear()
            reports = self.tiers.poll()
            self._stored.update(reports.stored)
            self.sources |= {each.load_id: each.sources for each in reports.loaded}


@contextmanager
def tier_world(
    num_host: int = 16,
    files: BlockStore | None = None,
    objects: BlockStore | None = None,
    copy: CopyBlocks = copy_blocks,
    clock: TierClock | None = None,
    pace: CopyPace | None = None,
    tenant_share: float = 1.0,
    num_kv_blocks: int = NUM_KV_BLOCKS,
    memory: KvMemory | None = None,
) -> Iterator[TierWorld]:
    """Run tiers. At the end everything is written, and no block of host memory is lost."""
    memory, host_memory = memory or make_memory(num_kv_blocks), OwnedMemory(num_host, seed=1)
    host = host_tier_in(host_memory, tenant_share)
    clock, woken = clock or Clock(), Event()
    stores = ((FILES, files), (replace(OBJECTS, refresh_s=REFRESH_S), objects))
    with TieredKv(
        memory.kv_access(host_memory, copy),
        host,
        [(kind, store) for kind, store in stores if store is not None],
        clock,
        pace=pace,
        wake=woken.set,
    ) as tiers:
        yield TierWorld(tiers, memory, host, clock, woken)
    host.check()
    memory.check()
