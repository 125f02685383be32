"""Queue of blocks that are to be stored in an external KV cache. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from baton.core.fair_queue import FairQueue
from baton.core.ids import BlockId
from baton.core.kv_hints import BlockHints, Tenant
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool

MIN_NUM_QUEUED = 64


class UnstoredBlock(NamedTuple):
    name: BlockHash
    block_id: BlockId
    hints: BlockHints


class UnstoredBlocks:
    """Tenants take turns.

    A block that is evicted stays in the queue until its turn, or until there are twice as many
    blocks as the pool has: memory is bounded, however long nothing can be stored.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._queue = FairQueue[Tenant, UnstoredBlock]()
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def add(self, block: UnstoredBlock) -> None:
        if self._num_queued >= max(MIN_NUM_QUEUED, 2 * self._pool.num_blocks):
            self._drop_evicted()
        self._queue.add(block.hints.tenant, block)
        self._num_queued += 1

    def take(self, may_store: Callable[[Tenant], bool]) -> UnstoredBlock | None:
        """Take the next cached block of the tenants that may store one."""
        while (block := self._queue.take(may_store)) is not None:
            self._num_queued -= 1
            if self._pool.find([block.name]) == [block.block_id]:
                return block
        return None

    def has_any(self, may_store: Callable[[Tenant], bool]) -> bool:
        """Return whether a tenant that may store a block has one, which may be evicted."""
        return self._queue.has_any(may_store)

    def clear(self) -> None:
        self._queue.clear()
        self._num_queued = 0

    def _drop_evicted(self) -> None:
        """Drop the blocks that are evicted, and all but the first of those queued repeatedly."""
        cached: dict[BlockHash, UnstoredBlock] = {}
        while (block := self.take(lambda _: True)) is not None:
            cached.setdefault(block.name, block)
        for block in cached.values():
            self._queue.add(block.hints.tenant, block)
        self._num_queued = len(cached)
