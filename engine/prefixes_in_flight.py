"""Index of the prefix blocks that peers are writing, so that no two hand-offs carry the same ones.

A block in flight is never a prefix hit. A request that lacks blocks which another hand-off is
bringing waits for that hand-off to end, and hits them then like any cached block. If they do not
come, it receives them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.hashing import BlockHash
from engine.lifecycle import Request
from engine.request import RequestId
from kv_transfer.types import NodeId

# At least this share of the blocks that either request still lacks must be common to both: nobody
# waits for a long hand-off because of a few blocks at its beginning.
MIN_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _Receiving:
    request: Request
    source: NodeId
    block_hashes: tuple[BlockHash, ...]  # of the whole blocks that are being written
    num_blocks: int
    since_s: float


class PrefixesInFlight:
    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._receiving: dict[RequestId, _Receiving] = {}  # the oldest first
        self._receiver_by_hash: dict[BlockHash, _Receiving] = {}

    def begin(self, request: Request, num_hits: int, now: float) -> None:
        """Blocks after the first `num_hits` were granted to the peer of this request."""
        hashes = tuple(request.block_hashes[num_hits:])
        if request.receive is None or not hashes:
            return
        receiving = _Receiving(
            request, request.receive.source.node_id, hashes, len(request.block_ids) - num_hits, now
        )
        self._receiving[request.request_id] = receiving
        for block_hash in hashes:
            self._receiver_by_hash.setdefault(block_hash, receiving)

    def end(self, request_id: RequestId) -> None:
        """Its blocks are cached by now, or will not come, or took too long."""
        receiving = self._receiving.pop(request_id, None)
        if receiving is None:
            return
        for block_hash in receiving.block_hashes:
            if self._receiver_by_hash.get(block_hash) is receiving:
                del self._receiver_by_hash[block_hash]

    def overdue(self, now: float) -> list[RequestId]:
        """Receiving requests for which nobody is to wait any longer."""
        found = []
        for request_id, receiving in self._receiving.items():
            if now - receiving.since_s < self._max_wait_s:
                break
            found.append(request_id)
        return found

    def receiver_for(self, request: Request, num_hits: int, num_blocks: int) -> RequestId | None:
        """The request whose hand-off brings most of what this one lacks.

        Only one of the same peer that ranks before it: a peer serves those in this order, so the
        wait is short, and trouble with one peer does not spread to requests of another.
        """
        missing: Sequence[BlockHash] = request.block_hashes[num_hits:]
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
        # After a reset of the cache, what it receives is never cached.
        will_be_cached = receiving.request.is_registering
        if not (is_enough and is_same_peer and will_be_cached):
            return None
        return receiving.request.request_id if receiving.request.rank < request.rank else None
