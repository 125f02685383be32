"""Prefix cache: blocks with names, and reports of those that it gains and loses."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.core.kv_hints import BlockHints
from baton.engine.events import AllBlocksCleared, BlockRemoved, BlockStored, GroupStats, KvEvent
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import group_of, is_of_first_group
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.cache_group import PrefixHit
from baton.engine.kv_cache.config import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.recurrent_state import SnapshotCache


class GroupCounters:
    """Prefix hits and evictions by group. Names of no KV group are those of the last one."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self._hits = [0] * len(self.names)
        self._evictions = [0] * len(self.names)

    def count_hit(self, hit: PrefixHit) -> None:
        for group, blocks in enumerate(hit.blocks):
            self._hits[group] += len(blocks) - blocks.count(NO_BLOCK)

    def count_evicted(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            group = group_of(name)
            self._evictions[-1 if group is None else group] += 1

    def stats(self, num_held: Sequence[int]) -> dict[str, GroupStats]:
        """Return the statistics by name, given the blocks that requests hold of each group."""
        counts = zip(num_held, self._hits, self._evictions, strict=True)
        return dict(zip(self.names, (GroupStats(*each) for each in counts), strict=True))


class PrefixCache:
    """The block pool of all kinds of memory, with what others have to know of its changes.

    Events tell routers where a prefix hit can end: after each block of the first KV group, or with
    recurrent layers after the blocks at whose ends there are snapshots. New blocks are queued to be
    stored in an external KV cache.
    """

    def __init__(self, config: CacheConfig, counters: GroupCounters, *, is_stored: bool) -> None:
        self._config = config
        self._counters = counters
        self._is_stored = is_stored  # in an external KV cache, too
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.snapshots = SnapshotCache(self.pool, config.layout.num_state_blocks)
        self._ends_at_snapshots = config.layout.num_state_blocks > 0
        self._unstored: deque[tuple[BlockHash, BlockId, BlockHints]] = deque()
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

    def unregister(self, block_ids: Iterable[BlockId], ends: Iterable[BlockHash]) -> None:
        """Remove blocks, and the snapshots at the ends of other ones."""
        self.pool.unregister(block_ids)
        if self._ends_at_snapshots:
            self.snapshots.remove(ends)
        self._report_evicted()

    def clear(self) -> int:
        """Remove all blocks, and return how many there were."""
        num_cached = self.pool.num_cached
        self.pool.forget_hashes()
        self.snapshots.clear()
        if self._config.collect_events:
            self._events.append(AllBlocksCleared())
        return num_cached

    # --- events -------------------------------------------------------------------

    def report_blocks(self, held: HeldKv, start: int, end: int) -> None:
        """Report new blocks of the first group, from one place of its table up to another."""
        # With recurrent layers, the blocks before a snapshot are no hit without it.
        if not self._ends_at_snapshots:
            self._report_stored(held, start, end)

    def report_snapshot(self, held: HeldKv, num_blocks: int) -> None:
        """Report a new snapshot after so many blocks."""
        self._report_stored(held, num_blocks - 1, num_blocks)

    def take_events(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def _report_stored(self, held: HeldKv, start: int, end: int) -> None:
        if start == end or not self._config.collect_events:
            return
        parent = held.block_hashes[start - 1] if start else None
        hashes = tuple(held.block_hashes[start:end])
        token_ids: tuple[int, ...] = ()
        if self._config.collect_token_ids:
            token_ids = tuple(held.token_ids[start * self.block_size : end * self.block_size])
        self._events.append(BlockStored(hashes, parent, token_ids, self.block_size, held.root_hash))

    def _report_evicted(self) -> None:
        evicted = self.pool.take_evicted()
        self._counters.count_evicted(evicted)
        if self._ends_at_snapshots:
            removed = self.snapshots.drop_evicted(evicted)
        else:
            removed = tuple(name for name in evicted if is_of_first_group(name))
        if removed and self._config.collect_events:
            self._events.append(BlockRemoved(removed))

    # --- external KV cache --------------------------------------------------------

    def queue_unstored(self, held: HeldKv, block_id: BlockId, name: BlockHash) -> None:
        """Queue a block to be stored, unless nobody expects it to be used again."""
        hints = held.block_hints
        if self._is_stored and not hints.is_released:
            self._unstored.append((name, block_id, hints))

    def take_unstored(self) -> tuple[BlockHash, BlockId, BlockHints] | None:
        """Return the next block to be stored, if any. It may have been evicted since."""
        return self._unstored.popleft() if self._unstored else None

    def forget_unstored(self) -> None:
        self._unstored.clear()

    @property
    def has_unstored(self) -> bool:
        return bool(self._unstored)
