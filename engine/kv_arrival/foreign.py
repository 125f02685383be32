"""Pulls of a prompt's KV from a server that is not Baton's, as `kv_transfer_params` name it.

The server holds the blocks for one request and for a limited time. So each request asks once, and
KV that is not needed is released.
"""

from __future__ import annotations

import math

from baton.core.errors import InvalidRequest
from baton.core.foreign_kv import FIELD, ForeignKv
from baton.core.request import EngineRequest
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, FillId, Fills, Offer, PrefixNeed
from baton.engine.kv_cache.cache import KvCache
from baton.kv_transfer.foreign_kv import (
    ForeignPull,
    ForeignPulled,
    ForeignPullId,
    ForeignReader,
    ForeignRelease,
)
from baton.kv_transfer.types import KvReports, StepOrders

VLLM = "vllm"  # source of the tokens in a request's statistics


class ForeignPrefixes:
    """Implements KvSource."""

    name = VLLM

    def __init__(
        self, cache: KvCache, fills: Fills, orders: StepOrders, reader: ForeignReader | None
    ) -> None:
        self._cache = cache
        self._fills = fills
        self._orders = orders
        self._reader = reader
        self._pulling: dict[ForeignPullId, Fill] = {}

    def __len__(self) -> int:
        return len(self._pulling)

    def check(self, request: EngineRequest, kv: ForeignKv) -> None:
        """Raise InvalidRequest if the request names a server that must not be dialled."""
        reader = self._reader
        # What the router has asked for is not read then: the client is not to blame.
        is_of_client = kv.age_s is None
        if is_of_client and (reader is None or not reader.allows(kv)):
            raise InvalidRequest(
                f"{FIELD} names the server {kv.address}, which is not among the --kv-sources of "
                "the decode node: add it there, or leave the field out",
                FIELD,
            )
        if request.adapter.id:
            raise InvalidRequest(f"{FIELD} cannot be used with adapters: leave it out", FIELD)

    def offer(self, arrival: Arrival, need: PrefixNeed, min_saved_s: float) -> Offer | None:
        """Offer the KV whenever it adds to the prefix: the client had it computed for this."""
        given, reader = arrival.foreign_kv, self._reader
        if given is None or reader is None:
            return None
        kv, received_s = given
        prefix = self._cache.external.find_promised(arrival.kv, need.max_num_tokens, kv.num_tokens)
        if not prefix.names or not reader.may_read(kv, received_s, need.now_s):
            self.let_go(arrival)
            return None
        return Offer(self, prefix, math.inf) if self._fills.fits(prefix, need.num_spare) else None

    def order(self, fill: Fill) -> None:
        if fill.arrival is None or fill.arrival.foreign_kv is None:
            return
        (kv, received_s), fill.arrival.foreign_kv = fill.arrival.foreign_kv, None
        pull_id = ForeignPullId(fill.fill_id)
        self._pulling[pull_id] = fill
        pull = ForeignPull(pull_id, kv, received_s, fill.prefix.places, fill.block_ids)
        self._orders.foreign.append(pull)

    def let_go(self, arrival: Arrival) -> None:
        """Release the KV that a request was given, unless a pull does so."""
        given, arrival.foreign_kv = arrival.foreign_kv, None
        if given is not None and self._reader is not None:
            self._orders.foreign.append(ForeignRelease(*given))

    def settle(self, reports: KvReports, now: float) -> list[FillId]:
        return [self._end(pulled) for pulled in reports.foreign]

    def _end(self, pulled: ForeignPulled) -> FillId:
        fill = self._pulling.pop(pulled.pull_id)
        sources = [VLLM if is_filled else None for is_filled in pulled.are_filled]
        self._fills.note_filled(fill, 0, sources)
        self._fills.end(fill)
        return fill.fill_id
