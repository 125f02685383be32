"""KV cache of requests: prefix lookup, block tables and registration of full blocks."""

from __future__ import annotations

from collections.abc import Iterable

from engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from engine.kv_cache.block_hashes import BlockHash, extend_hashes
from engine.kv_cache.block_pool import BlockPool
from engine.scheduler.config import CacheConfig
from engine.scheduler.request import Request
from kv_transfer.types import BlockId


class KvCache:
    def __init__(self, config: CacheConfig) -> None:
        self._config = config
        self._naming = config.naming
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self._events: list[KvEvent] = []
        self.total_query_tokens = 0
        self.total_hit_tokens = 0

    def root_hash(self, cache_salt: str, num_prompt_tokens: int) -> BlockHash:
        return self._naming.root(cache_salt, num_prompt_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def capacity(self, request: Request) -> int:
        return len(request.block_ids) * self.block_size

    def find_prefix(self, request: Request, max_num_tokens: int) -> list[BlockId]:
        """Return the blocks of the longest cached prefix of at most `max_num_tokens` tokens."""
        if not self._config.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        return self.pool.find(request.block_hashes[: max_num_tokens // self.block_size])

    def missing_hash(
        self, request: Request, num_hits: int, max_num_tokens: int
    ) -> BlockHash | None:
        """Return the hash of the first block that `find_prefix` did not find, or None.

        Once that block is cached, the prefix is longer even if no block was released.
        """
        if num_hits >= max_num_tokens // self.block_size or not self._config.enable_prefix_caching:
            return None
        return request.block_hashes[num_hits]

    def admit(self, request: Request, hits: list[BlockId], *, spare: int = 0) -> bool:
        """Allocate all blocks for a request that holds none. Returns False if there are too few.

        At least `spare` blocks must remain free.
        """
        missing = self.num_blocks_for(request.num_tokens) - len(hits)
        if missing + spare > self.pool.num_free - self.pool.num_free_among(hits):
            return False
        self.pool.hold(hits)
        request.block_ids = [*hits, *self._allocate(missing)]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_registered_blocks = len(hits)
        request.is_registering = self._config.enable_prefix_caching
        if not request.num_preemptions:  # afterwards it could hit its own blocks
            request.num_cached_tokens = request.num_computed_tokens
        self.total_query_tokens += request.num_tokens
        self.total_hit_tokens += request.num_computed_tokens
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[BlockId, ...] | None:
        """Add blocks until `num_tokens` tokens fit. Returns them, or None if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing > self.pool.num_free:
            return None
        added = self._allocate(max(missing, 0))
        request.block_ids += added
        return tuple(added)

    def register(self, request: Request) -> None:
        """Add the full blocks that the request has computed to the prefix cache."""
        num_full = request.num_computed_tokens // self.block_size
        first = request.num_registered_blocks
        if num_full <= first or not request.is_registering:
            return
        self._extend_hashes(request)
        run_start = first
        for place in range(first, num_full):
            if not self.pool.register(request.block_ids[place], request.block_hashes[place]):
                self._note_stored(request, run_start, place)
                run_start = place + 1
        self._note_stored(request, run_start, num_full)
        request.num_registered_blocks = num_full

    def release(self, request: Request) -> None:
        """Release all blocks of a request. Full ones stay in the prefix cache until evicted."""
        self.register(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_registered_blocks = 0

    def uncache_blocks(self, request: Request) -> None:
        """Remove a request's blocks, including its prefix hits, from the prefix cache.

        Called when the KV of the request may be wrong.
        """
        request.is_registering = False
        self.pool.unregister(request.block_ids)
        self._note_removed()

    def reset(self, holders: Iterable[Request]) -> int:
        """Drop every cached prefix and return the number of blocks they had.

        KV that `holders` compute based on old KV is never cached.
        """
        num_cached = self.pool.num_cached
        self.pool.forget_hashes()
        for request in holders:
            request.is_registering = False
        if self._config.collect_events:
            self._events.append(AllBlocksCleared())
        return num_cached

    def take_events(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events

    def _extend_hashes(self, request: Request) -> None:
        extend_hashes(request.block_hashes, request.root_hash, request.token_ids, self.block_size)

    def _allocate(self, count: int) -> list[BlockId]:
        """Allocate `count` blocks, which the caller has checked to be free."""
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks are needed, {self.pool.num_free} are free")
        self._note_removed()
        return blocks

    def _note_removed(self) -> None:
        evicted = self.pool.take_evicted()
        if evicted and self._config.collect_events:
            self._events.append(BlockRemoved(evicted))

    def _note_stored(self, request: Request, start: int, end: int) -> None:
        if start == end or not self._config.collect_events:
            return
        parent = request.block_hashes[start - 1] if start else None
        token_ids = request.token_ids[start * self.block_size : end * self.block_size]
        hashes = tuple(request.block_hashes[start:end])
        self._events.append(BlockStored(hashes, parent, tuple(token_ids), self.block_size))
