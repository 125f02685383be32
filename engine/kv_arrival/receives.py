"""Blocks that peers write: those of hand-offs, granted to one request, and those of pulls.

Requests that share a prefix arrive together, and a block in flight is never a prefix hit. So one of
them receives the prefix, and the others wait for that hand-off instead of receiving it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.core.ids import BlockId, BlockName, HandoffId
from baton.core.request import ReceiveKv
from baton.engine.kv_arrival.arrival import Arrival
from baton.engine.kv_arrival.fills import Fill, Fills, FillsByName
from baton.engine.kv_cache.block_pool import Hold, Holds
from baton.engine.kv_cache.cache import KvCache
from baton.engine.kv_cache.external_prefix import ExternalPrefix
from baton.engine.kv_cache.held_kv import HeldKv
from baton.kv_transfer.types import Proved, Receive, StepOrders

# Minimum share of common blocks among those that either request lacks, so that no request waits
# for a long hand-off because of a few blocks at its beginning.
MIN_SHARE = 0.5


class BlockReceives:
    """Receiving side of vLLM's V1 connector, as orders: its scheduler and worker share no object.

    `grant` corresponds to `get_num_new_matched_tokens` and `update_state_after_alloc`. Instead of a
    delayed free, blocks stay held until `end`: no write can reach them any more.
    """

    def __init__(self, cache: KvCache, holds: Holds, fills: Fills, orders: StepOrders) -> None:
        self._cache = cache
        self._order = cache.transfer_order
        self._holds = holds
        self._fills = fills
        self._orders = orders
        self._expected: set[HandoffId] = set()  # of requests not granted yet
        self._hold_by_id: dict[HandoffId, Hold] = {}
        self._fill_by_id: dict[HandoffId, Fill] = {}  # of hand-offs, not of pulls
        self._fills_by_name = FillsByName()

    def __len__(self) -> int:
        return len(self._hold_by_id)

    @property
    def num_blocks(self) -> int:
        return sum(len(hold.block_ids) for hold in self._hold_by_id.values())

    @property
    def num_pulled_blocks(self) -> int:
        """Blocks of pulls that peers may write, those of failed runs included."""
        return self.num_blocks - sum(len(fill.block_ids) for fill in self._fill_by_id.values())

    def is_known(self, handoff_id: HandoffId) -> bool:
        return handoff_id in self._expected or handoff_id in self._hold_by_id

    def expect(self, handoff: ReceiveKv) -> None:
        """Register the hand-off of a waiting request that will receive KV."""
        self._expected.add(handoff.handoff_id)

    def grant(self, arrival: Arrival, num_hits: int, now: float) -> None:
        """Grant the request's blocks after its prefix hits, and its state, to the peer."""
        handoff, kv = arrival.handoff, arrival.kv
        if handoff is None:
            return
        granted = self._order.blocks(kv, num_hits, kv.num_blocks)
        hold = self._hold(handoff.handoff_id, (*granted, *kv.context_state))
        self._expected.discard(handoff.handoff_id)
        num_blocks = kv.num_blocks
        prefix = ExternalPrefix(
            names=tuple(kv.block_hashes[num_hits:]),
            num_gained=num_blocks - num_hits,
            num_blocks=num_blocks,
        )
        block_ids, peer = tuple(hold.block_ids), handoff.source.node_id
        fill = self._fills.add(prefix, block_ids, hold, now, arrival, peer)
        self._fill_by_id[handoff.handoff_id] = fill
        self._fills_by_name.add(fill)
        self._orders.receives.append(
            Receive(
                handoff.handoff_id,
                handoff.source,
                self._order.index(kv, num_hits),
                fill.block_ids,
                num_tokens=kv.num_tokens,
                num_cached_tokens=kv.num_computed_tokens,
            )
        )

    def pull(self, receive: Receive) -> None:
        """Grant blocks to the peer, which sends cached blocks of its own."""
        self._hold(receive.handoff_id, receive.block_ids)
        self._orders.receives.append(receive)

    def fill_to_follow(self, arrival: Arrival, num_hits: int, now: float) -> Fill | None:
        """Return the hand-off of another request that carries most of the blocks this one lacks.

        It must have the same peer and a better rank. A peer serves hand-offs in this order, so the
        wait is short, and a failing peer does not affect requests of other peers.
        """
        if arrival.handoff is None:
            return None
        missing: Sequence[BlockName] = arrival.kv.block_hashes[num_hits:]
        fill = self._fills_by_name.find(missing[:1])
        if fill is None or fill.arrival is None:
            return None
        is_behind = fill.arrival.rank < arrival.rank
        is_same_peer = fill.peer == arrival.handoff.source.node_id
        if not (is_behind and is_same_peer) or fill.is_stale or fill.late_at_s <= now:
            return None
        num_shared = self._fills_by_name.num_leading(fill, missing)
        num_missing = self._cache.num_blocks_for(arrival.kv.num_tokens) - num_hits
        is_enough = num_shared >= MIN_SHARE * max(num_missing, fill.prefix.num_gained)
        return fill if is_enough else None

    def stop(self, arrival: Arrival, *, revokes: bool) -> Fill | None:
        """Let a request receive no more. Returns the fill that other requests may wait for.

        Its end must have been reported, unless this `revokes` the grant that the peer has.
        """
        if arrival.handoff is None:
            return None
        handoff_id, arrival.handoff = arrival.handoff.handoff_id, None
        self._expected.discard(handoff_id)
        fill = self._fill_by_id.get(handoff_id)
        if fill is not None:
            self._fills.remove(fill)
            self._fills_by_name.remove(fill)
        # Without a grant, the peer has nothing that could be taken back.
        if fill is not None and revokes:
            self._orders.revokes.append(handoff_id)
        return fill

    def receiver_of(self, handoff_id: HandoffId) -> Arrival | None:
        """Return the request that waits for this hand-off, if it still does."""
        fill = self._fill_by_id.get(handoff_id)
        arrival = None if fill is None else fill.arrival
        return None if arrival is None or arrival.handoff is None else arrival

    def receivers(self) -> Iterator[HeldKv]:
        """Yield the requests whose blocks a peer can write, ended ones included."""
        for fill in self._fill_by_id.values():
            if fill.arrival is not None:
                yield fill.arrival.kv

    def cache_proved(self, proved: Proved) -> None:
        """Cache the first blocks of a hand-off that does not land."""
        fill = self._fill_by_id.get(proved.handoff_id)
        if fill is not None and fill.arrival is not None:
            block_ids = fill.block_ids[: proved.num_blocks]
            self._cache.register_received(fill.arrival.kv, fill.num_hits, block_ids)

    def end(self, handoff_id: HandoffId) -> None:
        """Release the blocks of a hand-off, which the peer can no longer write.

        Reports of hand-offs that are over are ignored.
        """
        hold = self._hold_by_id.pop(handoff_id, None)
        if hold is not None:
            self._fill_by_id.pop(handoff_id, None)
            self._holds.close(hold)

    def _hold(self, handoff_id: HandoffId, block_ids: Sequence[BlockId]) -> Hold:
        hold = self._hold_by_id[handoff_id] = self._holds.open(block_ids)
        return hold
