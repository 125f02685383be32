"""The KV cache as requests see it: prefixes found, tables grown, full blocks registered."""

from __future__ import annotations

from collections.abc import Iterable

from engine.blocks import BlockPool
from engine.events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from engine.hashing import BlockHash, extend_hashes
from engine.lifecycle import Request
from engine.scheduler_config import CacheConfig
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
        """The longest cached prefix of at most so many tokens, in whole blocks."""
        if not self._config.enable_prefix_caching:
            return []
        self._extend_hashes(request)
        return self.pool.find(request.block_hashes[: max_num_tokens // self.block_size])

    def missing_hash(
        self, request: Request, num_hits: int, max_num_tokens: int
    ) -> BlockHash | None:
        """The first block that `find_prefix` did not find; None if no block was missing.

        The prefix is longer as soon as this block is cached, even if no block was released.
        """
        if num_hits >= max_num_tokens // self.block_size or not self._config.enable_prefix_caching:
            return None
        return request.block_hashes[num_hits]

    def admit(self, request: Request, hits: list[BlockId], *, spare: int = 0) -> bool:
        """Give a request that holds nothing all the blocks its tokens need, or change nothing.

        `spare` blocks must stay free beside it.
        """
        missing = self.num_blocks_for(request.num_tokens) - len(hits)
        if missing + spare > self.pool.num_free - self.pool.num_free_among(hits):
            return False
        self.pool.hold(hits)
        request.block_ids = [*hits, *self._allocate(missing)]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_registered_blocks = len(hits)
        request.is_registering = self._config.enable_prefix_caching
        if not request.num_preemptions:  # later it would find what it left there itself
            request.num_cached_tokens = request.num_computed_tokens
        self.total_query_tokens += request.num_tokens
        self.total_hit_tokens += request.num_computed_tokens
        return True

    def grow(self, request: Request, num_tokens: int) -> tuple[BlockId, ...] | None:
        """The blocks that were added so that so many tokens fit; None if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing > self.pool.num_free:
            return None
        added = self._allocate(max(missing, 0))
        request.block_ids += added
        return tuple(added)

    def register(self, request: Request) -> None:
        """Let others hit the full blocks that the request has computed."""
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
        """Take all blocks back; what it computed stays in the cache while there is room."""
        self.register(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_registered_blocks = 0

    def distrust(self, request: Request) -> None:
        """Its KV may be bad, the blocks it hit included: nobody shall hit them again."""
        request.is_registering = False
        self.pool.unregister(request.block_ids)
        self._note_removed()

    def reset(self, holders: Iterable[Request]) -> int:
        """Forget every cached prefix, and return how many blocks those were.

        What the holders compute on old KV is never cached.
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
        """`count` is known to be free."""
        blocks = self.pool.allocate(count)
        if blocks is None:
            raise RuntimeError(f"{count} blocks were promised, {self.pool.num_free} are free")
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
