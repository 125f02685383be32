"""Stores: blocks that enter the prefix cache are copied to a KV cache outside the engine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from baton.core.ids import BlockId, BlockName
from baton.core.kv_hints import BlockHints
from baton.engine.kv_arrival.holds import Hold, Holds
from baton.engine.kv_arrival.orders import StepOrders
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.held_kv import HeldKv
from baton.kv_transfer.external_kv import ExternalKv, Store, StoreId, Use

MAX_STORING_SHARE = 0.25  # of all blocks, for all stores together
MIN_STORING_BLOCKS = 8  # however small the pool is


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
        self._storing: dict[StoreId, Hold] = {}
        self._num_blocks = 0
        self._num_begun = 0

    def __len__(self) -> int:
        return len(self._storing)

    @property
    def can_begin(self) -> bool:
        return self._cache.prefixes.has_unstored and self._num_blocks < self._max_blocks

    def store_new(self) -> None:
        """Order the storing of blocks that were added to the prefix cache.

        Those that would be too many at once are stored later, unless they are evicted before.
        """
        if self._external is None:
            return
        names: list[BlockName] = []
        block_ids: list[BlockId] = []
        all_hints: list[BlockHints] = []
        room = self._max_blocks - self._num_blocks
        while len(names) < room and (oldest := self._cache.prefixes.take_unstored()) is not None:
            name, block_id, hints = oldest
            # Evicted since it was queued, or loaded from there.
            if self._cache.pool.find([name]) != [block_id] or self._external.holds(name):
                continue
            names.append(name)
            block_ids.append(block_id)
            all_hints.append(hints)
        if not names:
            return
        self._num_begun += 1
        store_id = StoreId(self._num_begun)
        self._storing[store_id] = self._holds.open(block_ids)
        self._num_blocks += len(block_ids)
        store = Store(store_id, tuple(names), tuple(block_ids), tuple(all_hints))
        self._orders.stores.append(store)

    def end(self, store_ids: Iterable[StoreId]) -> None:
        for store_id in store_ids:
            hold = self._storing.pop(store_id)
            self._num_blocks -= len(hold.block_ids)
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
