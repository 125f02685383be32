"""Index of the prefix blocks that peers are writing, so that no two hand-offs carry the same ones.

A block in flight is never a prefix hit. A request that needs blocks of another hand-off waits for
that hand-off to end, and then hits them like any cached block. If they do not arrive, it receives
them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import NodeId, RequestId
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.scheduler.request import Request

# Minimum share of common blocks among those that either request lacks, so that no request waits
# for a long hand-off because of a few blocks at its beginning.
MIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _PrefixInFlight:
    request: Request
    source: NodeId
    block_hashes: tuple[BlockHash, ...]  # of the full blocks in flight
    num_blocks: int
    since_s: float


class PrefixesInFlight:
    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._receiving: dict[RequestId, _PrefixInFlight] = {}  # the oldest first
        self._receiver_by_hash: dict[BlockHash, _PrefixInFlight] = {}

    def begin(self, request: Request, num_hits: int, now: float) -> None:
        """Add the blocks of a request after its first `num_hits`, which the peer writes now."""
        hashes = tuple(request.kv.block_hashes[num_hits:])
        if request.receive is None or not hashes:
            return
        receiving = _PrefixInFlight(
            request, request.receive.source.node_id, hashes, request.kv.num_blocks - num_hits, now
        )
        self._receiving[request.request_id] = receiving
        for block_hash in hashes:
            self._receiver_by_hash.setdefault(block_hash, receiving)

    def end(self, request_id: RequestId) -> None:
        """Remove a receiving request: its blocks are cached, lost or overdue."""
        receiving = self._receiving.pop(request_id, None)
        if receiving is None:
            return
        for block_hash in receiving.block_hashes:
            if self._receiver_by_hash.get(block_hash) is receiving:
                del self._receiver_by_hash[block_hash]

    def overdue(self, now: float) -> list[RequestId]:
        """Return the receiving requests that others must not wait for any longer."""
        found = []
        for request_id, receiving in self._receiving.items():
            if now - receiving.since_s < self._max_wait_s:
                break
            found.append(request_id)
        return found

    def receiver_for(self, request: Request, num_hits: int, num_blocks: int) -> RequestId | None:
        """Return the request whose hand-off carries most of the blocks that `request` lacks.

        It must have the same peer and a better rank. A peer serves hand-offs in this order, so the
        wait is short, and a failing peer does not affect requests of other peers.
        """
        missing: Sequence[BlockHash] = request.kv.block_hashes[num_hits:]
        receiving = self._receiver_by_hash.get(missing[0]) if missing else None
        if receiving is None or request.receive is None:
            return None
        num_shared = 0
        for block_hash in missing:
            if self._receiver_by_hash.get(block_hash) is not receiving:
                break
            num_shared += 1
        is_enough = num_shared >= MIN_SHARE * max(num_blocks - num_hits, receiving.num_blocks)
        is_same_peer = receiving.source == request.receive.source.node_id
        # Blocks received across a reset of the prefix cache are never cached.
        will_be_cached = receiving.request.kv.is_registering
        if not (is_enough and is_same_peer and will_be_cached):
            return None
        return receiving.request.request_id if receiving.request.rank < request.rank else None
