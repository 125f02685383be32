"""Prefix cache: blocks with names, and reports of those that it gains and loses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from baton.core.fair_queue import FairQueue
from baton.core.ids import BlockId
from baton.core.kv_hints import BlockHints, Tenant
from baton.core.media import PictureInBlock, pictures_within
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import PrefixEnds, group_of
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv

MIN_NUM_QUEUED = 64


class PrefixCache:
    """The block pool of all kinds of memory, with what others have to know of its changes.

    Events tell routers where a prefix hit can end (`PrefixEnds`). New blocks are queued to be
    stored in an external KV cache.
    """

    def __init__(self, config: CacheConfig, *, is_stored: bool) -> None:
        self._config = config
        self.total_evictions: Counter[int] = Counter()  # blocks by group
        self._is_stored = is_stored  # in an external KV cache, too
        self.block_size = config.block_size
        self.has_state = config.layout.has_state  # a prefix hit ends only at a cached state
        self.pool = BlockPool(config.num_blocks)
        self.ends = PrefixEnds(config.layout)
        self.unstored = UnstoredBlocks(self.pool)
        self._events: list[KvEvent] = []

    def hashes_within(self, held: HeldKv, max_num_tokens: int) -> list[BlockHash]:
        """Return the hashes of the full blocks that a prefix hit may have."""
        if not self._config.enable_prefix_caching:
            return []
        held.extend_hashes(self.block_size)
        return held.block_hashes[: max_num_tokens // self.block_size]

    def allocate(self, count: int) -> list[BlockId]:
        """Allocate `count` blocks, which the caller has checked to be free."""
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks are needed, {self.pool.num_free} are free")
        self._report_evicted()
        return blocks

    def register(self, held: HeldKv, block_id: BlockId, name: BlockHash) -> bool:
        """Add a block. Returns False if there is one of this name already."""
        is_new = self.pool.register(block_id, name)
        if is_new:
            self.queue_unstored(held, block_id, name)
        return is_new

    def add_end(
        self, end: BlockHash, names: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> bool:
        """Add all blocks that let a prefix hit end here. Returns False if they are there."""
        if end in self.ends:
            return False
        for name, block_id in zip(names, block_ids, strict=True):
            self.pool.register(block_id, name)
        self.ends.add(names)
        return True

    def unregister(self, block_ids: Iterable[BlockId]) -> None:
        self.pool.unregister(block_ids)
        self._report_evicted()

    def clear(self) -> int:
        """Remove all blocks, and return how many there were."""
        num_cached = self.pool.num_cached
        self.pool.forget_hashes()
        self.ends.clear()
        if self._config.collect_events:
            self._events.append(AllBlocksCleared())
        return num_cached

    def check(self) -> None:
        self.ends.check(self.pool.names)

    # --- events -------------------------------------------------------------------

    def take_events(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def report_stored(self, held: HeldKv, start: int, end: int) -> None:
        """Report that a prefix hit can end after these blocks of the request now."""
        if start == end or not self._config.collect_events:
            return
        parent = held.block_hashes[start - 1] if start else None
        hashes = tuple(held.block_hashes[start:end])
        size = self.block_size
        token_ids: tuple[int, ...] = ()
        pictures: tuple[tuple[PictureInBlock, ...], ...] = ()
        if self._config.collect_token_ids:
            token_ids = tuple(held.token_ids[start * size : end * size])
            if held.media:
                starts = range(start * size, end * size, size)
                pictures = tuple(pictures_within(held.media, at, at + size) for at in starts)
        self._events.append(
            BlockStored(hashes, parent, token_ids, size, held.root_hash, held.adapter, pictures)
        )

    def _report_evicted(self) -> None:
        removed: list[BlockHash] = []
        while evicted := self.pool.take_evicted():
            for name in evicted:  # Counter.update costs more
                self.total_evictions[group_of(name)] += 1
            lost = self.ends.remove(evicted)
            removed += lost
            if self.has_state:  # the other parts of a state are of no use, and evicted as well
                parts = (name for end in lost for name in self.ends.parts(end))
                self.pool.unregister(each for name in parts for each in self.pool.find([name]))
        if removed and self._config.collect_events:
            self._events.append(BlockRemoved(tuple(removed)))

    # --- external KV cache --------------------------------------------------------

    def queue_unstored(self, held: HeldKv, block_id: BlockId, name: BlockHash) -> None:
        """Queue a block to be stored, unless nobody expects it to be used again."""
        hints = held.block_hints
        if self._is_stored and not hints.is_released:
            self.unstored.add(UnstoredBlock(name, block_id, hints))


class UnstoredBlock(NamedTuple):
    name: BlockHash
    block_id: BlockId
    hints: BlockHints


class UnstoredBlocks:
    """Queue of blocks that are to be stored in an external KV cache. Tenants take turns.

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
