"""Eviction order of a tier's blocks: quotas, retention, priority, then least recent use. Pure.

A tenant that holds its share of the tier makes room by its own blocks. Blocks under retention are
not evicted; they may take half of the tier, and half of a tenant's share. Neither are pinned ones.
Of the others, those of the lowest priority are evicted first, in the order of their last use; the
end of a pin counts as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, SHARED, BlockHints, Tenant

DEFAULT_PRIORITY = 35
RELEASED = -1  # below all priorities
MAX_RETAINED_SHARE = 0.5
MIN_STALE_EXPIRIES = 64


class _PriorityLru:
    def __init__(self) -> None:
        self._names: dict[int, OrderedDict[BlockName, None]] = {}  # by priority

    def __iter__(self) -> Iterator[BlockName]:
        for priority in sorted(self._names):
            yield from self._names[priority]

    def add(self, name: BlockName, priority: int) -> None:
        """Add a name as the most recently used one of its priority."""
        self._names.setdefault(priority, OrderedDict())[name] = None

    def touch(self, name: BlockName, priority: int) -> None:
        """Make a name the most recently used one of its priority."""
        self._names[priority].move_to_end(name)

    def remove(self, name: BlockName, priority: int) -> None:
        names = self._names[priority]
        del names[name]
        if not names:
            del self._names[priority]


@dataclass(slots=True)
class _Block:
    tenant: Tenant
    priority: int
    retain_until_s: float | None = None
    is_pinned: bool = False

    @property
    def is_evictable(self) -> bool:
        return self.retain_until_s is None and not self.is_pinned


@dataclass(slots=True)
class _TenantBlocks:
    """Blocks of a tenant that has a quota."""

    evictable: _PriorityLru = field(default_factory=_PriorityLru)
    num_blocks: int = 0
    num_retained: int = 0


class EvictionOrder:
    """Names of the blocks in a tier. `now` is a time of the tier's clock, in seconds."""

    def __init__(self, max_blocks: int, tenant_share: float = 1.0) -> None:
        """With a `tenant_share` below 1, tenants have quotas, except for SHARED."""
        self.max_blocks = max_blocks
        self._tenant_share = tenant_share
        self._has_quotas = tenant_share < 1
        self._blocks: dict[BlockName, _Block] = {}
        self._evictable = _PriorityLru()
        self._expiries: list[tuple[float, BlockName]] = []  # a heap; some are out of date
        self.num_retained = 0  # some may have expired since the last change
        self._tenants: dict[Tenant, _TenantBlocks] = {}
        self.num_refused = 0  # blocks that were not retained, because too many are
        self.num_evicted = 0  # blocks; counted by the tier, which removes them

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: BlockName) -> bool:
        return name in self._blocks

    @property
    def _quota(self) -> int:
        return max(1, int(self.max_blocks * self._tenant_share))

    @property
    def names(self) -> list[BlockName]:
        return list(self._blocks)

    def tenant_of(self, name: BlockName) -> Tenant:
        block = self._blocks.get(name)
        return SHARED if block is None else block.tenant

    def hints_of(self, name: BlockName, now: float) -> BlockHints:
        """Return hints that give a copy of the block in another tier the same place."""
        block = self._blocks.get(name)
        if block is None:
            return NO_HINTS
        until_s = now if block.retain_until_s is None else block.retain_until_s
        return BlockHints(
            block.tenant,
            max(0.0, until_s - now),
            None if block.priority == RELEASED else block.priority,
            is_released=block.priority == RELEASED,
        )

    def is_at_quota(self, tenant: Tenant, num_reserved: int = 0) -> bool:
        """Return whether another block of the tenant needs the place of one of its own.

        Room for `num_reserved` further blocks of it is taken already.
        """
        if not self._has_quotas or tenant == SHARED:
            return False
        own = self._tenants.get(tenant)
        num_blocks = 0 if own is None else own.num_blocks
        return num_blocks + num_reserved >= self._quota

    def is_full_for(self, tenant: Tenant) -> bool:
        return len(self._blocks) >= self.max_blocks or self.is_at_quota(tenant)

    def victims(self, tenant: Tenant, now: float, num_reserved: int = 0) -> Iterator[BlockName]:
        """Yield blocks to evict for a block of the tenant, the best one first.

        The order must not change during the iteration.
        """
        self._expire(now)
        if not self.is_at_quota(tenant, num_reserved):
            yield from self._evictable
        elif tenant in self._tenants:
            yield from self._tenants[tenant].evictable

    def add(self, name: BlockName, hints: BlockHints, now: float) -> None:
        """Add a block as the most recently used one; if it is there, only note its use."""
        if name not in self._blocks:
            block = _Block(hints.tenant, DEFAULT_PRIORITY)
            self._blocks[name] = block
            if self._has_quotas and block.tenant != SHARED:
                self._tenants.setdefault(block.tenant, _TenantBlocks()).num_blocks += 1
            self._make_evictable(name, block)
        self.use(name, hints, now)

    def touch(self, name: BlockName) -> None:
        """Note the use of a block, if it is there, by a request without hints."""
        block = self._blocks.get(name)
        if block is None or block.retain_until_s is not None:
            return  # once a retention ends, its block counts as just used
        if block.priority == RELEASED:
            self._take_out(name, block)
            block.priority = DEFAULT_PRIORITY
            self._make_evictable(name, block)
            return
        if block.is_pinned:
            return
        self._evictable.touch(name, block.priority)
        if block.tenant in self._tenants:
            self._tenants[block.tenant].evictable.touch(name, block.priority)

    def use(self, name: BlockName, hints: BlockHints, now: float) -> None:
        """Note the use of a block, if it is there, and apply the hints of the request."""
        if hints.is_plain:
            self.touch(name)
            return
        block = self._blocks.get(name)
        if block is None:
            return
        self._expire(now)
        until_s = block.retain_until_s
        self._take_out(name, block)
        if hints.is_released:
            block.priority, until_s = RELEASED, None
        else:
            block.priority = _priority_after(block, hints)
            if hints.retain_s > 0:
                until_s = max(until_s or 0.0, now + hints.retain_s)
        self._put_back(name, block, until_s)

    def pin(self, name: BlockName) -> None:
        """Take a block out of the victims until `unpin`."""
        block = self._blocks[name]
        if block.is_evictable:
            self._take_out(name, block)
        block.is_pinned = True

    def unpin(self, name: BlockName) -> None:
        block = self._blocks[name]
        block.is_pinned = False
        if block.is_evictable:
            self._make_evictable(name, block)

    def remove(self, name: BlockName) -> None:
        block = self._blocks.pop(name, None)
        if block is None:
            return
        self._take_out(name, block)
        own = self._tenants.get(block.tenant)
        if own is not None:
            own.num_blocks -= 1
            if not own.num_blocks:
                del self._tenants[block.tenant]

    # --- helpers ------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        """End retentions. Their blocks become the most recently used ones that can be evicted."""
        while self._expiries and self._expiries[0][0] <= now:
            until_s, name = heappop(self._expiries)
            block = self._blocks.get(name)
            if block is not None and block.retain_until_s == until_s:
                self._take_out(name, block)
                self._make_evictable(name, block)

    def _put_back(self, name: BlockName, block: _Block, until_s: float | None) -> None:
        if until_s is None:
            self._make_evictable(name, block)
        elif self._can_retain(block.tenant):
            self._retain(name, block, until_s)
        else:
            self.num_refused += 1
            self._make_evictable(name, block)

    def _can_retain(self, tenant: Tenant) -> bool:
        own = self._tenants.get(tenant)
        if own is not None and own.num_retained >= int(self._quota * MAX_RETAINED_SHARE):
            return False
        return self.num_retained < int(self.max_blocks * MAX_RETAINED_SHARE)

    def _retain(self, name: BlockName, block: _Block, until_s: float) -> None:
        block.retain_until_s = until_s
        self.num_retained += 1
        if block.tenant in self._tenants:
            self._tenants[block.tenant].num_retained += 1
        heappush(self._expiries, (until_s, name))
        if len(self._expiries) > 2 * self.num_retained + MIN_STALE_EXPIRIES:
            names = {name for _, name in self._expiries}.intersection(self._blocks)
            until_s_by_name = {name: self._blocks[name].retain_until_s for name in names}
            # A sorted list is a heap.
            self._expiries = sorted(
                (until_s, name) for name, until_s in until_s_by_name.items() if until_s is not None
            )

    def _make_evictable(self, name: BlockName, block: _Block) -> None:
        if block.is_pinned:
            return
        self._evictable.add(name, block.priority)
        if block.tenant in self._tenants:
            self._tenants[block.tenant].evictable.add(name, block.priority)

    def _take_out(self, name: BlockName, block: _Block) -> None:
        """Remove a block from the retained or from the evictable ones."""
        own = self._tenants.get(block.tenant)
        if block.retain_until_s is not None:
            self.num_retained -= 1
            block.retain_until_s = None
            if own is not None:
                own.num_retained -= 1
            return
        if block.is_pinned:
            return
        self._evictable.remove(name, block.priority)
        if own is not None:
            own.evictable.remove(name, block.priority)


def _priority_after(block: _Block, hints: BlockHints) -> int:
    """Return the priority of a block that was used. A use lifts a release."""
    if hints.priority is not None:
        return hints.priority
    return DEFAULT_PRIORITY if block.priority == RELEASED else block.priority
