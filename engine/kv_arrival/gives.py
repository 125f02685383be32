"""The other side of pulls: cached blocks that peers request by name.

Blocks that only an external KV cache of this node has are loaded first. Only a part of the cache is
given at a time, since blocks cannot be evicted while they are sent. Other requests wait for their
turn, in order of arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.core.ids import BlockId, HandoffId
from baton.engine.kv_arrival.fills import FillId
from baton.engine.kv_arrival.loads import ExternalLoads
from baton.engine.kv_arrival.sends import BlockSends
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.cache import KvCache
from baton.kv_transfer.types import NOT_CACHED, TOO_MANY_PULLS, KvReports, Requested

MAX_GIVEN_SHARE = 0.5  # of all blocks, for all pulls together
MAX_WAITING = 1024  # runs


class GivenPulls:
    def __init__(self, cache: KvCache, sends: BlockSends, loads: ExternalLoads) -> None:
        self._pool = cache.pool
        self._sends = sends
        self._loads = loads
        self._block_size = cache.block_size
        self._max_blocks = int(cache.pool.num_blocks * MAX_GIVEN_SHARE)
        self._waiting: deque[Requested] = deque()
        self._loading: dict[FillId, Requested] = {}
        self._given: dict[HandoffId, tuple[BlockId, ...]] = {}
        self._num_given = 0  # blocks that are given or loaded

    def settle(self, reports: KvReports, ended: Iterable[FillId], now: float) -> None:
        """Apply the ends of given pulls and of loads for them, and give the blocks of new ones."""
        for handoff_id in reports.finished_sending:
            self._num_given -= len(self._given.pop(handoff_id, ()))
        for fill_id in ended:
            self._end_load(fill_id)
        for requested in reports.requested:
            is_too_large = len(requested.names) > self._max_blocks
            if is_too_large or len(self._waiting) >= MAX_WAITING:
                self._sends.refuse(requested.handoff_id, TOO_MANY_PULLS)
            else:
                self._waiting.append(requested)
        self._give_waiting(now)

    def withdraw(self, block_ids: Iterable[BlockId]) -> None:
        """Withdraw the pulls that send any of these blocks: their KV may be wrong."""
        wrong = set(block_ids)
        for handoff_id, given in self._given.items():
            if not wrong.isdisjoint(given):
                self._sends.withdraw_completed(handoff_id, "the KV may be wrong")

    def _give_waiting(self, now: float) -> None:
        while self._waiting:
            if self._num_given + len(self._waiting[0].names) > self._max_blocks:
                return
            requested = self._waiting.popleft()
            block_ids = self._find(requested)
            if None not in block_ids or not self._try_load(requested, block_ids, now):
                self._give(requested, block_ids)

    def _find(self, requested: Requested) -> list[BlockId | None]:
        """Return the cached block of each name; None for those that are not cached."""
        found = (self._pool.find([BlockHash(name)]) for name in requested.names)
        return [block_ids[0] if block_ids else None for block_ids in found]

    def _try_load(
        self, requested: Requested, block_ids: Sequence[BlockId | None], now: float
    ) -> bool:
        """Load the missing blocks. Returns False if that is not possible."""
        names = zip(requested.names, block_ids, strict=True)
        missing = [name for name, block_id in names if block_id is None]
        cached = [block_id for block_id in block_ids if block_id is not None]
        fill_id = self._loads.load_for_peer(missing, cached, now)
        if fill_id is None:
            return False
        self._loading[fill_id] = requested
        self._num_given += len(requested.names)
        return True

    def _end_load(self, fill_id: FillId) -> None:
        requested = self._loading.pop(fill_id, None)
        if requested is not None:
            self._num_given -= len(requested.names)
            self._give(requested, self._find(requested))

    def _give(self, requested: Requested, found: Sequence[BlockId | None]) -> None:
        block_ids = tuple(block_id for block_id in found if block_id is not None)
        if len(block_ids) < len(found):
            self._sends.refuse(requested.handoff_id, NOT_CACHED)
            return
        num_tokens = len(block_ids) * self._block_size
        if self._sends.give(requested.handoff_id, block_ids, num_tokens):
            self._given[requested.handoff_id] = block_ids
            self._num_given += len(block_ids)
