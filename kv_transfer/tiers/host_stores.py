"""Stores on their way from KV memory to host memory, and on to the tiers behind it.

A stored block is copied once there is room for it. Tenants take turns. While host memory is full of
blocks that files still lack, the KV cache keeps those that wait, as far as it can spare them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto

from baton.core.ids import BlockId, BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints, Tenant
from baton.kv_transfer.external_kv import Store, StoreId, Use
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.tiers.backing_tier import BackingTier, TierParts
from baton.kv_transfer.tiers.copy_pace import PacedWork
from baton.kv_transfer.tiers.host_tier import HostBlock
from baton.kv_transfer.tiers.tier_status import TierCounters

logger = logging.getLogger(__name__)

COPY_BLOCKS = 64  # at a time at most, for stores: loads wait meanwhile
# Of the KV cache, for blocks of tenants at their quotas that wait: the scheduler lets a quarter be
# stored at a time, and others need some of it.
MAX_AT_QUOTA_SHARE = 3 / 16
MIN_AT_QUOTA = 6  # blocks that may wait, however small the KV cache is


@dataclass(slots=True)
class Storing:
    """A store in progress. It ends with the last of its blocks."""

    store: Store
    generation: int
    ordered_s: float
    fence: Fence  # after the passes that write its blocks
    num_left: int  # blocks


@dataclass(frozen=True, slots=True)
class StoringBlock:
    storing: Storing
    name: BlockName
    block_id: BlockId
    hints: BlockHints


class StoreQueue:
    """Blocks that wait to be copied: a line for each tenant, in the order of their stores. Pure."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Tenant, deque[StoringBlock]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lines)

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Tenants with waiting blocks. The one that waits longest for its turn is the first."""
        return tuple(self._lines)

    def num_waiting(self, tenant: Tenant) -> int:
        return len(self._lines.get(tenant, ()))

    def add(self, storing: Storing) -> None:
        store = storing.store
        hints = store.hints or (NO_HINTS,) * len(store.names)
        for each in zip(store.names, store.block_ids, hints, strict=True):
            block = StoringBlock(storing, *each)
            self._lines.setdefault(block.hints.tenant, deque()).append(block)

    def take(self, tenant: Tenant) -> StoringBlock:
        """Take the first block of a tenant that has one."""
        block = self._lines[tenant].popleft()
        self._remove_if_empty(tenant)
        return block

    def take_last(self, tenant: Tenant) -> StoringBlock:
        block = self._lines[tenant].pop()
        self._remove_if_empty(tenant)
        return block

    def put_back(self, block: StoringBlock) -> None:
        """Make a block that was just taken the first one of its tenant again."""
        self._lines.setdefault(block.hints.tenant, deque()).appendleft(block)

    def end_turn(self, tenant: Tenant) -> None:
        if tenant in self._lines:
            self._lines.move_to_end(tenant)

    def drop(self, names: Collection[BlockName]) -> list[StoringBlock]:
        """Take the blocks of these names."""
        dropped = [block for line in self._lines.values() for block in line if block.name in names]
        if dropped:
            for tenant, line in list(self._lines.items()):
                self._lines[tenant] = deque(block for block in line if block.name not in names)
                self._remove_if_empty(tenant)
        return dropped

    def _remove_if_empty(self, tenant: Tenant) -> None:
        if not self._lines[tenant]:
            del self._lines[tenant]


class _Outcome(Enum):
    COPIED = auto()
    NO_ROOM = auto()  # host memory is full of blocks that files still lack
    AT_QUOTA = auto()  # all waiting blocks are of tenants whose share is full of such blocks


class HostStores:
    """The copying thread uses it; `take_ended` may be called from any."""

    def __init__(
        self,
        parts: TierParts,
        backing: Sequence[BackingTier],
        counters: TierCounters,
        *,
        must_yield: Callable[[], bool],
        is_urgent: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        """Copies stop where they can once `must_yield`, and do not rest while `is_urgent`."""
        self._parts = parts
        self._host, self._pace = parts.host, parts.pace
        self._backing = backing
        self._host_counters = counters
        self._must_yield = must_yield
        self._is_urgent = is_urgent
        self._on_end = on_end
        self._stores = StoreQueue()
        self._max_at_quota = max(MIN_AT_QUOTA, int(parts.kv.num_blocks * MAX_AT_QUOTA_SHARE))
        self._ended: deque[StoreId] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._stores)

    def take_ended(self) -> list[StoreId]:
        """Return the stores that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def add(self, storing: Storing) -> None:
        self._stores.add(storing)
        if not storing.num_left:
            self._report(storing)

    def copy(self, *, must_end: bool) -> None:
        """Copy blocks while there is room. With `must_end`, those without room are skipped."""
        while self._stores:
            outcome = self._copy_some(must_end=must_end)
            self._pace.set_short_of_room(outcome is _Outcome.NO_ROOM)
            if outcome is not _Outcome.COPIED or self._must_yield():
                return

    def use(self, use: Use, generation: int) -> None:
        """Note a use in all tiers, unless they were reset since it was ordered."""
        if generation != self._parts.generation:
            return
        self._host.use(use.names, use.hints)
        for tier in self._backing:
            tier.use(use.names, use.hints)

    def drop(self, names: AbstractSet[BlockName]) -> None:
        """End the blocks of these names that still wait."""
        self._end(self._stores.drop(names))

    def _copy_some(self, *, must_end: bool) -> _Outcome:
        """Copy the next blocks of a tenant for which there is room."""
        num_at_quota = 0
        for tenant in self._stores.tenants:
            if self._copy_next(tenant):
                return _Outcome.COPIED
            if must_end or not any(tier.delays_stores for tier in self._backing):
                self._skip(self._stores.take(tenant))
                return _Outcome.COPIED
            if not self._host.is_at_quota(tenant):
                return _Outcome.NO_ROOM
            num_at_quota += self._stores.num_waiting(tenant)
            for _ in range(max(0, num_at_quota - self._max_at_quota)):
                self._skip(self._stores.take_last(tenant))
                num_at_quota -= 1
        return _Outcome.AT_QUOTA

    def _copy_next(self, tenant: Tenant) -> bool:
        """Copy the next blocks of a tenant that fit. Returns False if none does."""
        ended: list[StoringBlock] = []
        try:
            copies = self._reserve_some(tenant, ended)
            if copies:
                self._copy_to_host(copies)
        except Exception:
            logger.exception("a store failed")
        self._stores.end_turn(tenant)
        self._end(ended)
        return bool(ended)

    def _reserve_some(
        self, tenant: Tenant, ended: list[StoringBlock]
    ) -> list[tuple[StoringBlock, HostBlock]]:
        """Reserve room for the next blocks of a tenant, as far as there is some.

        Adds the blocks that are taken from the queue to `ended`, also those that need no room.
        """
        copies: list[tuple[StoringBlock, HostBlock]] = []
        most = min(COPY_BLOCKS, self._pace.piece_blocks(self._parts.kv.block_bytes))
        while self._stores.num_waiting(tenant) and len(copies) < most:
            each = self._stores.take(tenant)
            ended.append(each)
            if self._host.holds(each.name):
                self.use(Use((each.name,), each.hints), each.storing.generation)
            elif each.storing.generation == self._parts.generation:
                block = self._host.reserve(tenant)
                if block is None:
                    self._stores.put_back(ended.pop())
                    break
                copies.append((each, block))
        return copies

    def _skip(self, block: StoringBlock) -> None:
        self._host_counters.num_skipped_stores += 1
        self._end((block,))

    def _end(self, blocks: Sequence[StoringBlock]) -> None:
        """Count blocks as stored, or skipped, and report stores of which none is left."""
        for block in blocks:
            block.storing.num_left -= 1
            if not block.storing.num_left:
                self._report(block.storing)

    def _report(self, storing: Storing) -> None:
        self._ended.append(storing.store.store_id)
        self._on_end()

    def _copy_to_host(self, copies: Sequence[tuple[StoringBlock, HostBlock]]) -> None:
        blocks, kv, host = [block for _, block in copies], self._parts.kv, self._host
        try:
            # That of the last one passes last. Loads that are ordered meanwhile have later ones.
            copies[-1][0].storing.fence.wait()
            digests, _ = self._pace.copy_blocks(
                lambda block_ids, slots: kv.store(block_ids, host.memory, slots),
                kv.block_bytes,
                blocks=[each.block_id for each, _ in copies],
                into=[block.slot for block in blocks],
                work=PacedWork.STORE,
                ordered_s=copies[0][0].storing.ordered_s,
                is_urgent=self._is_urgent,
            )
        except Exception:
            for block in blocks:
                self._host.abandon(block)
            raise
        for (each, block), digest in zip(copies, digests, strict=True):
            self._store_block(each, block, digest)
        self._host.unpin_all(blocks)
        self._host_counters.num_stored += len(copies)

    def _store_block(self, each: StoringBlock, block: HostBlock, digest: bytes) -> None:
        """Publish a block that was copied to host memory, and write it to the tiers behind."""
        self._host.publish(each.name, block, digest, each.hints)
        for tier in self._backing:
            pinned = None if tier.holds(each.name) else self._host.pin(each.name)
            if pinned is not None:
                tier.write(each.name, pinned, each.hints, each.storing.generation)
