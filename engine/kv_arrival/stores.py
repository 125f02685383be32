"""Stores: blocks that enter the prefix cache are copied to a KV cache outside the engine.

Tenants take turns, and a slow store of one must leave room for those of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from baton.core.kv_hints import SHARED, Tenant
from baton.engine.kv_cache.block_pool import Hold, Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_cache import UnstoredBlock
from baton.kv_transfer.external_kv import ExternalKv, Store, StoreId, Use
from baton.kv_transfer.types import StepOrders

MAX_STORING_SHARE = 0.25  # of all blocks, for all stores together
MIN_STORING_BLOCKS = 8  # however small the pool is
MAX_TENANT_SHARE = 0.5  # of these, for the stores of one tenant


class BlockStores:
    def __init__(
        self, cache: KvCache, holds: Holds, orders: StepOrders, external: ExternalKv | None
    ) -> None:
        self._cache = cache
        self._holds = holds
        self._orders = orders
        self._external = external
        num_blocks = cache.pool.num_blocks
        self._max_blocks = max(MIN_STORING_BLOCKS, int(num_blocks * MAX_STORING_SHARE))
        self._max_of_tenant = int(self._max_blocks * MAX_TENANT_SHARE)
        self._storing: dict[StoreId, tuple[Tenant, Hold]] = {}
        self._num_blocks = 0
        self._num_by_tenant: Counter[Tenant] = Counter()
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._storing)

    @property
    def can_begin(self) -> bool:
        return not self._is_full and self._cache.prefixes.unstored.has_any(self._has_room)

    def store_new(self) -> None:
        """Order the storing of blocks that were added to the prefix cache.

        Those that would be too many at once are stored later, unless they are evicted before.
        """
        if self._external is None:
            return
        by_tenant: dict[Tenant, list[UnstoredBlock]] = {}
        unstored = self._cache.prefixes.unstored
        # A tenant has room unless it has taken its share, which few have: the first is taken.
        while not self._is_full and (block := unstored.take(self._has_room)) is not None:
            if self._external.holds(block.name):
                continue  # loaded from there
            by_tenant.setdefault(block.hints.tenant, []).append(block)
            self._count(block.hints.tenant, 1)
        for tenant, blocks in by_tenant.items():
            self._begin(tenant, blocks)

    def end(self, store_ids: Iterable[StoreId]) -> None:
        for store_id in store_ids:
            tenant, hold = self._storing.pop(store_id)
            self._count(tenant, -len(hold.block_ids))
            self._holds.close(hold)

    def note_end(self, kv: HeldKv, num_cached_tokens: int) -> None:
        """Report the blocks that a request used, before it releases them.

        Of a request without hints, these are its prefix hits: tiers have just stored the others.
        If the blocks are expected to be used again, tiers also get the hits that they lack.
        """
        if self._external is None:
            return
        hints = kv.block_hints
        num_hits = num_cached_tokens // self._cache.block_size
        hits = self._cache.external.names_of(kv, num_hits)
        names = hits if hints.is_plain else self._cache.external.names_of(kv)
        held = tuple(filter(self._external.holds, reversed(names)))
        if held:
            self._orders.uses.append(Use(held, hints))
        if hints.is_wanted:
            self._cache.external.store_hits(kv, num_hits)

    def drop(self, kv: HeldKv) -> None:
        """Order that the blocks of a request are never loaded again: their KV may be wrong."""
        if self._external is not None:
            self._orders.drops += self._cache.external.names_of(kv)

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        """Clear these tiers, or all, and return how many blocks each had."""
        return {} if self._external is None else self._external.clear(tiers)

    # --- helpers --------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._num_blocks >= self._max_blocks

    def _has_room(self, tenant: Tenant) -> bool:
        """Return whether another block of the tenant may be stored. SHARED is all clients."""
        return tenant == SHARED or self._num_by_tenant[tenant] < self._max_of_tenant

    def _count(self, tenant: Tenant, change: int) -> None:
        self._num_blocks += change
        self._num_by_tenant[tenant] += change
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]

    def _begin(self, tenant: Tenant, blocks: Sequence[UnstoredBlock]) -> None:
        """Order the store of blocks of one tenant: it ends as soon as they are copied."""
        self._num_begun += 1
        store_id = StoreId(self._num_begun)
        names, block_ids, hints = zip(*blocks, strict=True)
        self._storing[store_id] = tenant, self._holds.open(block_ids)
        self._orders.stores.append(Store(store_id, names, block_ids, hints))
