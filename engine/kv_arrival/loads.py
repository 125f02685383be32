"""Loads from a KV cache outside the engine, such as tiers in host memory and files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from baton.core.ids import BlockId, BlockName
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId, Fills, Offer, PrefixNeed
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.kv_transfer.external_kv import ExternalKv, Load, Loaded, LoadId
from baton.kv_transfer.types import KvReports, StepOrders

MAX_LOADING_SHARE = 0.5  # of all blocks, for several loads together
MIN_LOADING_BLOCKS = 8  # however small the pool is


class ExternalLoads:
    """Implements KvSource."""

    name = "external"

    def __init__(
        self, cache: KvCache, fills: Fills, orders: StepOrders, external: ExternalKv | None
    ) -> None:
        self._cache = cache
        self._fills = fills
        self._orders = orders
        self._external = external
        num_blocks = cache.pool.num_blocks
        self._max_blocks = max(MIN_LOADING_BLOCKS, int(num_blocks * MAX_LOADING_SHARE))
        self._loading: dict[LoadId, Fill] = {}
        self._num_blocks = 0
        self._first_for_room: Arrival | None = None  # by rank, of those that found too little
        self.total_tokens: Counter[str] = Counter()  # of prompts, by source

    def __len__(self) -> int:
        return len(self._loading)

    def offer(self, arrival: Arrival, need: PrefixNeed, min_saved_s: float) -> Offer | None:
        external = self._external
        if external is None:
            return None
        prefix = self._cache.external.find_held(
            arrival.kv, need.max_num_tokens, external.holds, continues_at=need.continues_at
        )
        saved_s = math.inf
        if need.token_s is not None:
            other_s = prefix.num_gained * self._cache.block_size * need.token_s
            saved_s = other_s - external.load_s(prefix.names)
        if not prefix.names or saved_s <= 0:
            arrival.asked.add(self.name)
            return None
        if saved_s < min_saved_s:
            return None
        if not self._has_room(len(prefix.names)) or self._is_behind(arrival, need.now_s):
            follows = self._wait_for_room(arrival, need.now_s)
            return None if follows is None else Offer(self, prefix, saved_s, follows=follows)
        # Loaded blocks can be evicted once the load has ended, which is soon: running requests
        # need no blocks left. Granted ones are lacking until the hand-off ends.
        num_spare = 0 if need.continues_at is None else need.num_spare
        return Offer(self, prefix, saved_s) if self._fills.fits(prefix, num_spare) else None

    def order(self, fill: Fill) -> None:
        load_id = LoadId(fill.fill_id)
        self._loading[load_id] = fill
        self._num_blocks += len(fill.block_ids)
        request_id = "" if fill.arrival is None else fill.arrival.kv.request_id
        self._orders.loads.append(Load(load_id, fill.prefix.names, fill.block_ids, request_id))

    def load_for_peer(
        self, names: Sequence[BlockName], cached: Sequence[BlockId], now: float
    ) -> FillId | None:
        """Load blocks that a peer pulls, and hold the `cached` ones meanwhile.

        Returns None if the external cache does not hold all of them, or there is no room.
        """
        external = self._external
        if external is None or not all(map(external.holds, names)):
            return None
        are_cached = (True,) * len(cached) + (False,) * len(names)
        prefix = ExternalPrefix(
            tuple(cached),
            tuple(names),
            groups=tuple(map(self._cache.external.group_of, names)),
            places=(0,) * len(names),  # not known, and not needed without their tokens
            are_cached=are_cached,
            num_independent=len(names),
        )
        if not self._has_room(len(names)) or not self._fills.fits(prefix):
            return None
        fill = self._fills.begin(prefix, now)
        self.order(fill)
        return fill.fill_id

    def settle(self, reports: KvReports, now: float) -> list[FillId]:
        return [self._end(loaded) for loaded in reports.external.loaded]

    def _end(self, loaded: Loaded) -> FillId:
        fill = self._loading.pop(loaded.load_id)
        self._num_blocks -= len(fill.block_ids)
        self._fills.note_filled(fill, 0, loaded.sources)
        self._fills.end(fill)
        if fill.arrival is not None and not fill.is_stale:
            for source, token_range in fill.filled_ranges(self._cache.block_size):
                self.total_tokens[source] += len(token_range)
        return fill.fill_id

    def _has_room(self, num_missing: int) -> bool:
        return not self._loading or self._num_blocks + num_missing <= self._max_blocks

    def _is_behind(self, arrival: Arrival, now: float) -> bool:
        """Return whether loads of later requests would take the room that another one waits for."""
        first = self._first_for_room
        if first is None or first is arrival or not self._loading:
            return False
        will_load = first.is_waiting and self.name not in first.asked and first.may_wait(now)
        return will_load and first.rank < arrival.rank

    def _wait_for_room(self, arrival: Arrival, now: float) -> Fill | None:
        """Return a load after which there may be room for another one."""
        if not self._is_behind(arrival, now):
            self._first_for_room = arrival
        return next((fill for fill in self._loading.values() if now < fill.late_at_s), None)
