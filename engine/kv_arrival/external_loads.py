"""The scheduler's half of loads from, and stores to, a KV cache outside the engine.

A load fills blocks that no request holds and adds them to the prefix cache. The request that caused
it waits meanwhile without blocks, and then finds a longer prefix. If a load fails, the prefix is
just shorter. Blocks are stored once they are in the prefix cache. A load or store has its own
reference on each of its blocks until its end is reported.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId, BlockName
from baton.core.kv_hints import BlockHints
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.engine.kv_cache.manager import KvCache
from baton.engine.scheduler.request import Request, RequestStatus
from baton.kv_transfer.external_kv import (
    NO_ORDERS,
    ExternalKv,
    ExternalOrders,
    ExternalReports,
    Load,
    Loaded,
    LoadId,
    Store,
    StoreId,
    Use,
)

MAX_LOADING_SHARE = 0.5  # of all blocks, for several loads together
MAX_STORING_SHARE = 0.25
LEAST_BLOCKS = 8  # for loads, and for stores, however small the pool is


@dataclass(slots=True)
class _PendingLoad:
    request: Request | None  # None: for a peer
    prefix: ExternalPrefix
    block_ids: tuple[BlockId, ...]  # to be filled
    since_s: float
    is_stale: bool = False  # the prefix cache was reset: the blocks must not be cached

    @property
    def held(self) -> list[BlockId]:
        """The whole prefix in order, so that its end is evicted first."""
        return self.prefix.with_loaded(self.block_ids)


class ExternalTransfers:
    def __init__(self, cache: KvCache, external: ExternalKv | None, max_wait_s: float) -> None:
        self._cache = cache
        self._external = external
        self._max_wait_s = max_wait_s
        num_blocks = cache.pool.num_blocks
        self._max_loading = max(LEAST_BLOCKS, int(num_blocks * MAX_LOADING_SHARE))
        self._max_storing = max(LEAST_BLOCKS, int(num_blocks * MAX_STORING_SHARE))
        self._loading: dict[LoadId, _PendingLoad] = {}
        self._storing: dict[StoreId, tuple[BlockId, ...]] = {}
        self._loads: list[Load] = []
        self._stores: list[Store] = []
        self._drops: list[BlockName] = []
        self._uses: list[Use] = []
        self._num_loading = self._num_storing = 0  # blocks
        self._first_for_room: Request | None = None  # by rank, of those that found too little
        self._num_started = 0
        self.total_loaded_blocks = 0
        self.total_loaded_tokens: Counter[str] = Counter()  # of prompts, by source
        self.total_failed_blocks = 0  # that the external cache seemed to hold

    @property
    def has_orders(self) -> bool:
        can_store = self._cache.has_unstored and self._num_storing < self._max_storing
        return bool(self._loads or self._stores or self._drops or self._uses or can_store)

    @property
    def is_active(self) -> bool:
        return bool(self._loading or self._storing)

    def held_blocks(self) -> Iterator[BlockId]:
        for load in self._loading.values():
            yield from load.held
        for block_ids in self._storing.values():
            yield from block_ids

    # --- orders -------------------------------------------------------------------

    def take_orders(self) -> ExternalOrders:
        """Return and clear the orders of the step."""
        if not (self._loads or self._stores or self._drops or self._uses):
            return NO_ORDERS
        orders = ExternalOrders(
            tuple(self._loads), tuple(self._stores), tuple(self._drops), tuple(self._uses)
        )
        self._loads.clear()
        self._stores.clear()
        self._drops.clear()
        self._uses.clear()
        return orders

    def try_load(
        self,
        request: Request,
        max_num_tokens: int,
        now: float,
        token_s: float | None,
        saved_elsewhere_s: float = 0.0,
        *,
        num_spare: int = 0,
        continues_at: int | None = None,
    ) -> LoadId | None:
        """Load the blocks that would make the request's prefix longer, if that is worth it.

        `token_s` is the time to compute a token, or to receive it, if it is known. A load must save
        more time than `saved_elsewhere_s`. `num_spare` blocks stay free; `continues_at` is that of
        `KvCache.find_prefix`. Each request looks once, and again after a preemption.
        """
        if self._external is None or not request.may_load:
            return None
        prefix = self._cache.find_external(request.kv, max_num_tokens, continues_at=continues_at)
        num_missing = len(prefix.names)
        saved_s = self._saved_s(prefix, token_s)
        if not num_missing or saved_s <= 0:
            request.may_load = False
            return None
        if saved_s < saved_elsewhere_s:
            return None
        pool = self._cache.pool
        if not self._has_room(num_missing) or self._is_behind(request, now):
            return self._wait_for_room(request, now)
        if num_missing + pool.num_free_among(prefix.cached) + num_spare > pool.num_free:
            return None
        request.may_load = False
        return self._start_load(request, prefix, now)

    def load_for_peer(
        self, names: Sequence[BlockName], cached: Sequence[BlockId], now: float
    ) -> LoadId | None:
        """Load blocks that a peer pulls, and hold the `cached` ones meanwhile.

        Returns None if the external cache does not hold all of them, or there is no room.
        """
        if self._external is None or not all(map(self._external.holds, names)):
            return None
        pool, num_missing = self._cache.pool, len(names)
        if not self._has_room(num_missing):
            return None
        if num_missing + pool.num_free_among(cached) > pool.num_free:
            return None
        are_cached = (True,) * len(cached) + (False,) * num_missing
        prefix = ExternalPrefix(tuple(cached), tuple(names), are_cached=are_cached)
        return self._start_load(None, prefix, now)

    def store_new(self) -> None:
        """Order the storing of blocks that were added to the prefix cache.

        Those that would be too many at once are stored later, unless they are evicted before.
        """
        if self._external is None:
            return
        pool = self._cache.pool
        names: list[BlockName] = []
        block_ids: list[BlockId] = []
        all_hints: list[BlockHints] = []
        room = self._max_storing - self._num_storing
        while len(names) < room and (oldest := self._cache.take_unstored()) is not None:
            name, block_id, hints = oldest
            if pool.find([name]) != [block_id] or self._external.holds(name):
                continue
            names.append(name)
            block_ids.append(block_id)
            all_hints.append(hints)
        if not names:
            return
        pool.hold(block_ids)
        store_id = StoreId(self._next_number())
        self._storing[store_id] = tuple(block_ids)
        self._num_storing += len(block_ids)
        self._stores.append(Store(store_id, tuple(names), tuple(block_ids), tuple(all_hints)))

    def note_end(self, request: Request) -> None:
        """Report the blocks that a request used, before it releases them.

        Of a request without hints, these are its prefix hits: tiers have just stored the others.
        If the blocks are expected to be used again, tiers also get the hits that they lack.
        """
        if self._external is None:
            return
        hints = request.kv.block_hints
        num_hits = request.num_cached_tokens // self._cache.block_size
        hits = self._cache.names_of(request.kv, num_hits)
        names = hits if hints.is_plain else self._cache.names_of(request.kv)
        held = tuple(filter(self._external.holds, reversed(names)))
        if held:
            self._uses.append(Use(held, hints))
        if hints.is_wanted:
            self._cache.store_hits(request.kv, num_hits)

    def drop(self, request: Request) -> None:
        """Order that the blocks of a request are never loaded again: their KV may be wrong."""
        if self._external is not None:
            self._drops += self._cache.names_of(request.kv)

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        """Clear these tiers, or all, and return how many blocks each had."""
        return {} if self._external is None else self._external.clear(tiers)

    def forget(self) -> None:
        """Forget what was to be stored. What is being loaded will not be cached."""
        self._cache.forget_unstored()
        for load in self._loading.values():
            load.is_stale = True

    def _has_room(self, num_missing: int) -> bool:
        return not self._loading or self._num_loading + num_missing <= self._max_loading

    def _is_behind(self, request: Request, now: float) -> bool:
        """Return whether loads of later requests would take the room that another one waits for."""
        first = self._first_for_room
        if first is None or first is request or not self._loading:
            return False
        is_waiting = first.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        is_in_time = first.fetches_until_s is None or now < first.fetches_until_s
        return is_waiting and first.may_load and is_in_time and first.rank < request.rank

    def _wait_for_room(self, request: Request, now: float) -> LoadId | None:
        """Return a load after which there may be room for another one."""
        if not self._is_behind(request, now):
            self._first_for_room = request
        ids = (i for i, load in self._loading.items() if now - load.since_s < self._max_wait_s)
        return next(ids, None)

    def _start_load(self, request: Request | None, prefix: ExternalPrefix, now: float) -> LoadId:
        self._cache.pool.hold(prefix.cached)
        block_ids = tuple(self._cache.allocate_loaded(len(prefix.names)))
        load_id = LoadId(self._next_number())
        self._loading[load_id] = _PendingLoad(request, prefix, block_ids, now)
        self._num_loading += len(block_ids)
        request_id = "" if request is None else request.request_id
        self._loads.append(Load(load_id, prefix.names, block_ids, request_id))
        return load_id

    # --- reports ------------------------------------------------------------------

    def overdue(self, now: float) -> list[LoadId]:
        """Return the loads that requests must not wait for any longer."""
        return [
            load_id
            for load_id, load in self._loading.items()
            if now - load.since_s >= self._max_wait_s
        ]

    def settle(self, reports: ExternalReports) -> list[LoadId]:
        """Apply the ends of loads and stores. Returns the loads that have ended."""
        for store_id in reports.stored:
            block_ids = self._storing.pop(store_id)
            self._num_storing -= len(block_ids)
            self._cache.pool.release(block_ids)
        for loaded in reports.loaded:
            self._end_load(loaded)
        return [loaded.load_id for loaded in reports.loaded]

    def _end_load(self, loaded: Loaded) -> None:
        load = self._loading.pop(loaded.load_id)
        self._num_loading -= len(load.block_ids)
        sources = loaded.sources
        self.total_loaded_blocks += sum(source is not None for source in sources)
        self.total_failed_blocks += sum(source is None for source in sources)
        if not load.is_stale:
            self._cache_loaded(load, sources)
        self._cache.pool.release(load.held)

    def _cache_loaded(self, load: _PendingLoad, sources: Sequence[str | None]) -> None:
        are_loaded = [source is not None for source in sources]
        if load.request is None:
            self._cache.register_named(load.prefix.names, load.block_ids, are_loaded)
            return
        self._cache.register_loaded(load.request.kv, load.prefix, load.block_ids, are_loaded)
        if all(are_loaded):
            load.request.num_found_blocks = load.prefix.num_blocks
        for source, token_range in zip(
            sources, load.prefix.token_ranges(self._cache.block_size), strict=True
        ):
            if source is not None and token_range is not None:
                load.request.note_loaded(source, token_range)
                self.total_loaded_tokens[source] += len(token_range)

    def _saved_s(self, prefix: ExternalPrefix, token_s: float | None) -> float:
        """Return the time that a load saves, compared with computing the tokens."""
        if self._external is None or token_s is None:
            return math.inf
        compute_s = prefix.num_gained * self._cache.block_size * token_s
        return compute_s - self._external.load_s(prefix.names)

    def _next_number(self) -> int:
        self._num_started += 1
        return self._num_started
