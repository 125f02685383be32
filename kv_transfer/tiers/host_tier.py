"""KV blocks in host memory, by name, and those that wait to be written or dropped."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from baton.core.fair_queue import FairQueue
from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant
from baton.kv_transfer.external_kv import HeldChanges
from baton.kv_transfer.tiers.eviction import EvictionOrder
from baton.kv_transfer.tiers.host_growth import HostGrowth
from baton.kv_transfer.tiers.kv_access import BlockMemory


@dataclass(slots=True)
class HostBlock:
    slot: int  # in the memory of the tier
    tenant: Tenant
    digest: bytes = b""
    name: BlockName | None = None  # once it is published
    num_pins: int = 0  # while it is written or read
    is_removed: bool = False  # its slot is free once no one reads it any more


class HostTier:
    """Thread-safe. A block is written between `reserve` and `publish`, and read while pinned."""

    def __init__(
        self,
        memory: BlockMemory,
        owner: object = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        growth: HostGrowth | None = None,
    ) -> None:
        self.memory = memory
        self._growth = growth or HostGrowth(memory)
        self._owner = owner  # keeps the memory mapped
        self._clock = clock
        self._lock = Lock()
        self._free: list[int] = []
        self._blocks: dict[BlockName, HostBlock] = {}
        self._num_reserved: Counter[Tenant] = Counter()  # blocks, not published yet
        self.order = EvictionOrder(memory.num_blocks, tenant_share)
        self._changes: dict[BlockName, bool] = {}  # not taken yet; True: the name is here now
        self._is_room_wanted = False  # since a reservation failed
        # Called when there may be room after a reservation has failed, on any thread.
        self.on_room: Callable[[], None] = lambda: None
        # Called with the number of blocks that may be used, when there are more.
        self.on_grown: Callable[[int], None] = lambda _: None

    def holds(self, name: BlockName) -> bool:
        return name in self._blocks

    def is_at_quota(self, tenant: Tenant) -> bool:
        """Return whether another block of the tenant needs the place of one of its own."""
        with self._lock:
            return self._is_at_quota(tenant)

    def reserve(self, tenant: Tenant = SHARED) -> HostBlock | None:
        """Return a block to write to; None if all that may be replaced are pinned."""
        with self._lock:
            if not self._free:
                self._grow()
            while not self._free or self._is_at_quota(tenant):
                if not self._evict(tenant):
                    self._is_room_wanted = True
                    return None
            self._num_reserved[tenant] += 1
            return HostBlock(self._free.pop(), tenant, num_pins=1)

    def publish(
        self, name: BlockName, block: HostBlock, digest: bytes, hints: BlockHints = NO_HINTS
    ) -> None:
        """Add a block that was written. It stays pinned. If its name is known, it is not found."""
        with self._lock:
            block.digest = digest
            self._end_reservation(block)
            self.order.add(name, hints, self._clock())
            if name in self._blocks:
                block.is_removed = True
            else:
                block.name = name
                self._blocks[name] = block
                self.order.pin(name)
                self._note_change(name, is_held=True)

    def use(self, names: Iterable[BlockName], hints: BlockHints) -> None:
        """Note the use of those of the blocks that are here, and apply the hints of the request."""
        with self._lock:
            now = self._clock()
            for name in names:
                self.order.use(name, hints, now)

    def pin(self, name: BlockName) -> HostBlock | None:
        """Return a block that stays until `unpin`; None if it is not here."""
        with self._lock:
            return self._pin(name)

    def pin_all(self, names: Sequence[BlockName]) -> list[HostBlock | None]:
        with self._lock:
            return [self._pin(name) for name in names]

    def unpin(self, block: HostBlock) -> None:
        self.unpin_all((block,))

    def unpin_all(self, blocks: Iterable[HostBlock]) -> None:
        with self._lock:
            for block in blocks:
                block.num_pins -= 1
                if not block.num_pins:
                    self._handle_last_unpin(block)
        self._report_room()

    def abandon(self, block: HostBlock) -> None:
        """Give back a reserved block that was not published."""
        with self._lock:
            self._end_reservation(block)
            block.is_removed = True
        self.unpin(block)

    def remove(self, name: BlockName) -> None:
        with self._lock:
            self._remove(name)
        self._report_room()

    def clear(self) -> None:
        with self._lock:
            for name in list(self._blocks):
                self._remove(name)
        self._report_room()

    def take_changes(self) -> HeldChanges:
        """Return the changes of the names held since the last call."""
        with self._lock:
            changes, self._changes = self._changes, {}
        return HeldChanges(
            tuple(name for name, is_held in changes.items() if is_held),
            tuple(name for name, is_held in changes.items() if not is_held),
        )

    def check(self) -> None:
        """Raise if a slot was lost. Call it while no block is written or read."""
        with self._lock:
            num_slots = self._growth.num_blocks
            slots = [*self._free, *(block.slot for block in self._blocks.values())]
            num_pinned = sum(block.num_pins > 0 for block in self._blocks.values())
        if num_pinned or sorted(slots) != list(range(num_slots)):
            raise RuntimeError(
                f"{num_pinned} pinned; {len(slots)} of {num_slots} slots are accounted for"
            )

    def _grow(self) -> None:
        new = self._growth.grow()
        self._free.extend(reversed(new))
        # Tenants share what there is while it cannot grow.
        self.order.max_blocks = self.memory.num_blocks if new else self._growth.num_blocks
        if new:
            self.on_grown(self._growth.num_blocks)

    def _pin(self, name: BlockName) -> HostBlock | None:
        block = self._blocks.get(name)
        if block is not None:
            self.order.touch(name)
            if not block.num_pins:
                self.order.pin(name)
            block.num_pins += 1
        return block

    def _is_at_quota(self, tenant: Tenant) -> bool:
        return self.order.is_at_quota(tenant, self._num_reserved[tenant])

    def _end_reservation(self, block: HostBlock) -> None:
        self._num_reserved[block.tenant] -= 1
        if not self._num_reserved[block.tenant]:
            del self._num_reserved[block.tenant]

    def _evict(self, tenant: Tenant) -> bool:
        victims = self.order.victims(tenant, self._clock(), self._num_reserved[tenant])
        name = next(victims, None)
        if name is None:
            return False
        self._remove(name)
        self.order.num_evicted += 1
        return True

    def _handle_last_unpin(self, block: HostBlock) -> None:
        if block.is_removed or block.name is None:
            self._free.append(block.slot)
        else:
            self.order.unpin(block.name)

    def _report_room(self) -> None:
        if self._is_room_wanted:
            self._is_room_wanted = False
            self.on_room()

    def _note_change(self, name: BlockName, *, is_held: bool) -> None:
        # A second change takes back the first, so there are few of them even if no one takes them.
        if self._changes.pop(name, None) is None:
            self._changes[name] = is_held

    def _remove(self, name: BlockName) -> None:
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self.order.remove(name)
        self._note_change(name, is_held=False)
        block.is_removed = True
        if not block.num_pins:
            self._free.append(block.slot)


@dataclass(frozen=True, slots=True)
class QueuedWrite:
    name: BlockName
    block: HostBlock  # pinned until it is written
    hints: BlockHints
    generation: int
    ordered_s: float


class WriteQueue:
    """Tenants take turns. Thread-safe."""

    def __init__(self) -> None:
        self._queue = FairQueue[Tenant, QueuedWrite]()
        self._lock = Lock()

    def add(self, write: QueuedWrite) -> None:
        with self._lock:
            self._queue.add(write.block.tenant, write)

    def take(self, max_writes: int) -> list[QueuedWrite]:
        with self._lock:
            taken = (self._queue.take() for _ in range(max_writes))
            return [write for write in taken if write is not None]


class DroppedNames:
    """Thread-safe. A name is in it until each of its drops has ended."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_drops: Counter[BlockName] = Counter()

    def __contains__(self, name: BlockName) -> bool:
        return name in self._num_drops

    def begin(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            self._num_drops.update(names)

    def end(self, names: Iterable[BlockName]) -> None:
        with self._lock:
            for name in names:
                self._num_drops[name] -= 1
                if not self._num_drops[name]:
                    del self._num_drops[name]
