"""KV that comes from, or goes to, elsewhere: the interface of this room for the scheduler.

Other nodes and caches fill blocks (`fills.py`), and requests wait for fills. What accesses blocks
holds them (`Holds`). Receiving (`receives.py`, `pulls.py`, `loads.py`, `foreign.py`) and giving
(`sends.py`, `stores.py`) are apart: blocks that a peer pulls may be loaded for it, but
never pulled, or two nodes could wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId, Fills, KvSource, Offer, PrefixNeed
from baton.engine.kv_arrival.foreign import ForeignPrefixes
from baton.engine.kv_arrival.loads import ExternalLoads
from baton.engine.kv_arrival.pulls import DEFAULT_PULLS, PeerPulls, PullConfig
from baton.engine.kv_arrival.receives import BlockReceives
from baton.engine.kv_arrival.sends import BlockSends, GivenPulls
from baton.engine.kv_arrival.stores import BlockStores
from baton.engine.kv_cache.block_pool import Holds
from baton.engine.kv_cache.cache import KvCache
from baton.kv_transfer.external_kv import ExternalKv
from baton.kv_transfer.foreign_kv import ForeignReader
from baton.kv_transfer.types import KvReports, StepOrders


@dataclass(frozen=True, slots=True)
class KvSources:
    """Sources of KV, besides hand-offs."""

    external: ExternalKv | None = None  # tiers or a KV connector
    foreign: ForeignReader | None = None  # servers that are not Baton's
    pulls: PullConfig = DEFAULT_PULLS  # from peers


NO_SOURCES = KvSources()


class KvArrivals:
    def __init__(self, cache: KvCache, sources: KvSources, max_wait_s: float) -> None:
        external, foreign = sources.external, sources.foreign
        self._cache = cache
        self._max_wait_s = max_wait_s
        self.orders = StepOrders()
        self.holds = holds = Holds(cache.pool)
        self.fills = fills = Fills(cache, holds, max_wait_s)
        self.receives = BlockReceives(cache, holds, fills, self.orders)
        self.sends = BlockSends(holds, cache.transfer_order, self.orders)
        self.stores = BlockStores(cache, holds, self.orders, external)
        self.loads = ExternalLoads(cache, fills, self.orders, external)
        self.pulls = PeerPulls(cache, fills, self.receives, sources.pulls)
        self.foreign = ForeignPrefixes(cache, fills, self.orders, foreign)
        self.gives = GivenPulls(cache, self.sends, self.loads)
        # The last one wins a tie: a load takes nothing from others.
        self._sources: list[KvSource] = [self.pulls]
        if foreign is not None:
            self._sources.insert(0, self.foreign)
        if external is not None:
            self._sources.append(self.loads)

    # --- waits of requests ----------------------------------------------------------

    def find_fill(self, arrival: Arrival, need: PrefixNeed) -> tuple[FillId, float] | None:
        """Return a fill that gets a prefix sooner than computing or receiving it, if there is one.

        The request waits for it until the time returned at most: all its waits share one deadline.
        """
        until_s = arrival.waits_until_s
        if until_s is None:
            until_s = need.now_s + self._max_wait_s
        if need.now_s >= until_s:
            return None
        # Blocks that arrive anyway come first: they cost nobody anything.
        fill = self.receives.fill_to_follow(arrival, need.num_hits, need.now_s)
        fill = fill or self._fill_by_best_offer(arrival, need)
        if fill is None:
            return None
        arrival.waits_until_s = until_s
        return fill.fill_id, min(until_s, fill.late_at_s)

    def forget(self) -> None:
        """Forget what was to be stored. What is being filled will not be cached."""
        self._cache.prefixes.unstored.clear()
        self.fills.forget()

    # --- reports --------------------------------------------------------------------

    def settle_fills(self, reports: KvReports, now: float) -> list[FillId]:
        """Apply the ends of loads and pulls, and return these."""
        return [ended for source in self._sources for ended in source.settle(reports, now)]

    def settle_gives(self, reports: KvReports, ended: list[FillId], now: float) -> None:
        """Apply the ends of stores, and give peers what they pull."""
        self.stores.end(reports.external.stored)
        self.gives.settle(reports, ended, now)

    # --- queries --------------------------------------------------------------------

    @property
    def will_release_blocks(self) -> bool:
        """True if loads, pulls or stores hold blocks, which is never for long."""
        num_moving = len(self.stores) + len(self.loads) + len(self.foreign)
        return bool(num_moving or self.receives.num_pulled_blocks)

    @property
    def has_orders(self) -> bool:
        return bool(self.orders) or self.stores.can_begin

    # --- helpers --------------------------------------------------------------------

    def _fill_by_best_offer(self, arrival: Arrival, need: PrefixNeed) -> Fill | None:
        """Begin, or follow, the fill that saves most time. None: nothing beats computing."""
        best: Offer | None = None
        for source in self._sources:
            if source.name not in arrival.asked:
                # A lookup hashes and searches the prompt, so that sources that said no are skipped.
                min_saved_s = 0.0 if best is None else best.saved_s
                best = source.offer(arrival, need, min_saved_s) or best
        if best is None or best.follows is not None:
            return None if best is None else best.follows
        arrival.asked.add(best.source.name)
        fill = self.fills.begin(best.prefix, need.now_s, arrival, best.peer)
        best.source.order(fill)
        return fill
