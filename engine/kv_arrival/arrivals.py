"""KV that comes from, or goes to, elsewhere: the interface of this room for the scheduler.

Other nodes and caches fill blocks (`fills.py`), and requests wait for fills. What accesses blocks
holds them (`holds.py`). Receiving (`receives.py`, `pulls.py`, `loads.py`) and giving (`sends.py`,
`gives.py`, `stores.py`) are apart: blocks that a peer pulls may be loaded for it, but never pulled,
or two nodes could wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.core.ids import Peer
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId, Fills
from baton.engine.kv_arrival.gives import GivenPulls
from baton.engine.kv_arrival.holds import Holds
from baton.engine.kv_arrival.kv_source import KvSource, Offer, PrefixNeed
from baton.engine.kv_arrival.loads import ExternalLoads
from baton.engine.kv_arrival.orders import StepOrders
from baton.engine.kv_arrival.pulls import PeerPulls, PullConfig
from baton.engine.kv_arrival.receives import BlockReceives
from baton.engine.kv_arrival.sends import BlockSends
from baton.engine.kv_arrival.stores import BlockStores
from baton.engine.kv_cache.manager import KvCache
from baton.kv_transfer.external_kv import ExternalKv
from baton.kv_transfer.types import KvReports


class FillWait(NamedTuple):
    """A request waits for this fill, until then at most."""

    fill_id: FillId
    until_s: float


class KvArrivals:
    def __init__(
        self,
        cache: KvCache,
        external: ExternalKv | None,  # None: no tiers
        pulls: PullConfig | None,  # None: prefixes are never pulled from peers
        max_wait_s: float,
    ) -> None:
        self._cache = cache
        self._max_wait_s = max_wait_s
        self.orders = StepOrders()
        self.holds = holds = Holds(cache.pool)
        self.fills = fills = Fills(cache, holds, max_wait_s)
        self.receives = BlockReceives(cache, holds, fills, self.orders)
        self.sends = BlockSends(holds, cache.transfer_order, self.orders)
        self.stores = BlockStores(cache, holds, self.orders, external)
        self.loads: ExternalLoads | None = None
        self.pulls: PeerPulls | None = None
        if external is not None:
            self.loads = ExternalLoads(cache, fills, self.orders, external)
        if pulls is not None:
            self.pulls = PeerPulls(cache, fills, self.receives, pulls)
        self.gives = GivenPulls(cache, self.sends, self.loads)
        # The last one wins a tie: a load takes nothing from a peer.
        sources: tuple[KvSource | None, ...] = (self.pulls, self.loads)
        self._sources = tuple(source for source in sources if source is not None)

    # --- waits of requests ----------------------------------------------------------

    def find_fill(self, arrival: Arrival, need: PrefixNeed) -> FillWait | None:
        """Return a fill that gets a prefix sooner than computing it, if there is one.

        All fills that a request waits for share one deadline.
        """
        until_s = self._waits_until_s(arrival, need.now_s)
        if need.now_s >= until_s:
            return None
        return self._wait(arrival, self._fill_by_best_offer(arrival, need), until_s)

    def find_fill_before_grant(
        self, arrival: Arrival, num_hits: int, num_spare: int, now: float
    ) -> FillWait | None:
        """Return a fill after which a peer has to send less, if that saves time.

        The peer computes the prompt meanwhile, and sends the rest.
        """
        until_s = self._waits_until_s(arrival, now)
        if now >= until_s or arrival.handoff is None:
            return None
        # Blocks that arrive anyway come first.
        fill = self.receives.fill_to_follow(arrival, num_hits)
        if fill is None:
            num_tokens = arrival.kv.num_tokens
            token_s = self._receive_token_s(arrival.handoff.source, now)
            need = PrefixNeed(num_tokens, token_s, now, num_spare, continues_at=num_tokens)
            fill = self._fill_by_best_offer(arrival, need)
        return self._wait(arrival, fill, until_s)

    def take_overdue(self, now: float) -> list[FillId]:
        """Return, once, the fills that requests must not wait for any longer."""
        overdue = self.fills.take_overdue(now)
        for fill in overdue:
            if self.pulls is not None:
                self.pulls.note_overdue(fill, now)
        return [fill.fill_id for fill in overdue]

    def forget(self) -> None:
        """Forget what was to be stored. What is being filled will not be cached."""
        self._cache.prefixes.forget_unstored()
        self.fills.forget()

    # --- reports --------------------------------------------------------------------

    def settle_fills(self, reports: KvReports, now: float) -> list[FillId]:
        """Apply the ends of loads and pulls and return them."""
        ended = [] if self.pulls is None else self.pulls.settle(reports, now)
        if self.loads is not None:
            ended += self.loads.settle(reports.external.loaded)
        return ended

    def settle_gives(self, reports: KvReports, ended: list[FillId], now: float) -> None:
        """Apply the ends of sends and stores, and give peers what they pull."""
        for handoff_id in reports.finished_sending:
            self.sends.end(handoff_id)
        self.stores.end(reports.external.stored)
        self.gives.settle(reports, ended, now)

    # --- queries --------------------------------------------------------------------

    @property
    def has_orders(self) -> bool:
        return bool(self.orders) or self.stores.can_begin

    @property
    def awaits_peers(self) -> bool:
        return bool(self.receives or self.sends)

    @property
    def awaits_external(self) -> bool:
        return bool(self.loads or self.stores)

    @property
    def total_unknown_reports(self) -> int:
        return self.receives.total_unknown_reports + self.sends.total_unknown_reports

    # --- helpers --------------------------------------------------------------------

    def _fill_by_best_offer(self, arrival: Arrival, need: PrefixNeed) -> Fill | None:
        """Begin, or follow, the fill that saves most time. None: nothing beats computing."""
        best: Offer | None = None
        for source in self._sources:
            if source.name not in arrival.asked:
                min_saved_s = 0.0 if best is None else best.saved_s
                best = source.offer(arrival, need, min_saved_s) or best
        if best is None or best.follows is not None:
            return None if best is None else best.follows
        arrival.note_asked(best.source.name)
        fill = self.fills.begin(arrival, best.prefix, need.now_s)
        best.source.order(fill)
        return fill

    def _waits_until_s(self, arrival: Arrival, now: float) -> float:
        return now + self._max_wait_s if arrival.waits_until_s is None else arrival.waits_until_s

    def _wait(self, arrival: Arrival, fill: Fill | None, until_s: float) -> FillWait | None:
        if fill is None:
            return None
        arrival.waits_until_s = until_s
        return FillWait(fill.fill_id, until_s)

    def _receive_token_s(self, peer: Peer, now: float) -> float:
        return 0.0 if self.pulls is None else self.pulls.receive_token_s(peer, now)
