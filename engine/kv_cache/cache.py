"""KV cache of requests: searches, admission, growth, registration and release over all groups.

A request has one block table for each KV group of the model. Tables have one entry per block of
tokens, so all of a request's tables have the same length; entries of blocks that no later token
attends to are NO_BLOCK (-1). With recurrent layers, it also has a state of a fixed number of
blocks, in one more group.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.events import GroupStats
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.cache_group import CacheGroup, PassChunk, PrefixHit, PrefixSearch
from baton.engine.kv_cache.external_prefix import ExternalPrefixes
from baton.engine.kv_cache.groups import CacheConfig
from baton.engine.kv_cache.held_kv import HeldKv, TransferOrder
from baton.engine.kv_cache.prefix_cache import PrefixCache
from baton.engine.kv_cache.state_group import state_groups
from baton.engine.kv_cache.token_group import token_groups
from baton.engine.plan import NO_STATE_COPIES, BlockTables, StateCopies


class KvCache:
    """Blocks of all requests, in one group for each kind of memory that the model needs.

    A model has layers with full attention (group 0) and with windows of 3 tokens (group 1), and
    blocks hold 2 tokens. Request A with 5 tokens takes blocks 0, 1, 2 of group 0 and 3, 4, 5 of
    group 1. Once its first 4 tokens are computed, blocks 0, 1 and 3, 4 are in the prefix cache,
    named by the hashes h0 and h1 of the first 2 and 4 tokens, and for group 1 by h0+1 and h1+1.
    Token 5 attends to tokens 3 and 4, so that the table of group 1 becomes `[-1, 4, 5]`: block 3 is
    free, but cached.

    Request B begins with the same 4 tokens, and hits blocks 0, 1 of group 0 and block 4 of group 1,
    also if block 3 was evicted: no token after the prefix attends to it. If block 4 was evicted, B
    hits 2 tokens, blocks 0 and 3. If both were, it hits nothing.
    """

    def __init__(self, config: CacheConfig, *, is_stored: bool = False) -> None:
        self._config = config
        self.naming = config.naming
        self.block_size = config.block_size
        self.prefixes = PrefixCache(config, is_stored=is_stored)
        self.pool = self.prefixes.pool
        self._tables = token_groups(config.layout, self.prefixes)
        self._states = state_groups(config.layout, self.prefixes)  # at most one
        self._groups: tuple[CacheGroup, ...] = (*self._tables, *self._states)
        self._nothing: BlockTables = tuple(() for _ in self._tables)
        specs = tuple(group.spec for group in self._tables)
        self.transfer_order = TransferOrder(specs, config.block_size)
        self._search = PrefixSearch(self._groups, self.block_size)
        self.external = ExternalPrefixes(self.prefixes, self._groups, self._search)
        self.total_query_tokens = 0
        self.total_hit_tokens = 0
        self._total_hits: Counter[int] = Counter()  # blocks by group

    @property
    def num_groups(self) -> int:
        return len(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold these tokens in one group."""
        return -(-num_tokens // self.block_size)

    def capacity(self, held: HeldKv) -> int:
        """Return the number of tokens for which the request has blocks, or needs none."""
        return held.num_blocks * self.block_size if self._tables else sys.maxsize

    def find_prefix(
        self, held: HeldKv, max_num_tokens: int, *, continues_at: int | None = None
    ) -> PrefixHit:
        """Return the longest cached prefix of at most `max_num_tokens` tokens.

        `continues_at` is the position of the next token that is computed here, if it is not the
        token after the prefix. Groups with windows need only the blocks that this token sees.
        """
        hashes = self.prefixes.hashes_within(held, max_num_tokens)
        return self._search.find(self.pool, hashes, continues_at)

    def missing_hash(self, held: HeldKv, num_hits: int, max_num_tokens: int) -> BlockHash | None:
        """Return the hash of the first block that `find_prefix` did not find, or None.

        Once that block is cached, the prefix is longer even if no block was released.
        """
        # With recurrent layers, prefixes end at cached states, which are released once they are
        # cached: the release is noticed anyway.
        if self.prefixes.has_state:
            return None
        hashes = self.prefixes.hashes_within(held, max_num_tokens)
        return hashes[num_hits] if num_hits < len(hashes) else None

    def num_missing(self, held: HeldKv, hit: PrefixHit) -> int:
        """Return the number of blocks that `admit` has to find, apart from the prefix."""
        num_blocks = self.num_blocks_for(held.num_tokens)
        num_allocated = sum(group.num_allocated(held, hit, num_blocks) for group in self._groups)
        return num_allocated + self.pool.num_free_among(hit.block_ids)

    def admit(self, held: HeldKv, hit: PrefixHit, *, spare: int = 0) -> bool:
        """Allocate all blocks for a request that holds none. Returns False if there are too few.

        At least `spare` blocks must remain free.
        """
        if self.num_missing(held, hit) + spare > self.pool.num_free:
            return False
        # Before anything is allocated, which could evict the hit.
        self.pool.hold(hit.block_ids)
        num_blocks = self.num_blocks_for(held.num_tokens)
        held.num_computed_tokens = hit.num_blocks * self.block_size
        held.num_registered_blocks = hit.num_blocks
        for group in self._groups:
            group.allocate(held, hit, num_blocks)
        held.is_registering = self._config.enable_prefix_caching
        self.total_query_tokens += held.num_tokens
        self.total_hit_tokens += held.num_computed_tokens
        for number, block_ids in enumerate(hit.blocks):
            self._total_hits[number] += len(block_ids) - block_ids.count(NO_BLOCK)
        return True

    def grow(self, held: HeldKv, num_tokens: int) -> BlockTables | None:
        """Add blocks until `num_tokens` tokens fit. Returns them, or None if there are too few."""
        missing = self.num_blocks_for(num_tokens) - len(held.block_tables[0])
        if missing <= 0:
            return self._nothing
        # All tables or none: they have the same length, and a request that got a part of its
        # blocks would hold them while it waits for the others.
        if missing * len(self._tables) > self.pool.num_free:
            return None
        added = tuple([tuple(self.prefixes.allocate(missing)) for _ in self._tables])
        for table, block_ids in zip(held.block_tables, added, strict=True):
            table.extend(block_ids)
        return added

    def release_unseen(self, held: HeldKv) -> None:
        """Release the blocks that no later token of the request attends to."""
        for group in self._tables:
            group.release_unseen(held)

    def register(self, held: HeldKv) -> None:
        """Add the full blocks that the request has computed to the prefix cache."""
        num_full = held.num_computed_tokens // self.block_size
        first = held.num_registered_blocks
        if num_full <= first or not held.is_registering:
            return
        held.extend_hashes(self.block_size)
        for group in self._tables:
            group.register(held, first, num_full)
        held.num_registered_blocks = num_full

    def register_received(self, held: HeldKv, first: int, block_ids: Sequence[BlockId]) -> None:
        """Add the first blocks of a transfer that is over to the prefix cache, from this place on.

        The request may have ended. With recurrent layers, no prefix ends there without the state.
        """
        if not held.is_registering or self.prefixes.has_state:
            return
        # A window leaves gaps: the blocks in front of it were not transferred.
        end = first + self.transfer_order.num_whole_places(len(block_ids))
        places = range(first, min(end, len(held.block_hashes)))  # the last block may not be full
        slots = itertools.product(places, self._tables)
        for (place, group), block_id in zip(slots, block_ids, strict=False):
            group.register_block(held, place, block_id)

    def keep(self, hit: PrefixHit) -> None:
        """Make the blocks of a hit those that were used most recently."""
        self.pool.hold(hit.block_ids)
        self.pool.release(hit.block_ids)

    def start_decode(self, held: HeldKv, position: int, max_num_slots: int) -> None:
        """Note that the next pass to be planned computes the token at this position.

        Each pass after it computes the next one.
        """
        for states in self._states:
            states.start_decode(held, position, max_num_slots)

    def plan_pass(self, chunks: Sequence[PassChunk] | None) -> StateCopies:
        """Return what the pass copies for the prefix cache, given its prefill chunks.

        None: it computes nothing, not even for requests that decode. Passes end in the order in
        which they are planned.
        """
        for states in self._states:
            return states.plan_pass(chunks)
        return NO_STATE_COPIES

    def end_chunk(self, held: HeldKv) -> None:
        """Note that a pass has computed a prefill chunk of the request, and cache its blocks."""
        for group in self._groups:
            group.end_chunk(held)
        self.register(held)

    def end_pass(self) -> None:
        """Cache what the first of the planned passes has copied."""
        for states in self._states:
            states.end_pass()

    def release(self, held: HeldKv, *, is_over: bool = True) -> None:
        """Release all blocks of a request. Full ones stay in the prefix cache until evicted.

        Unless it `is_over`, it needs them again, whatever its hints say about its end.
        """
        self.register(held)  # what was computed since the last step
        # In the order of the sequence, which is evicted from its end: what remains can be hit.
        placed = [each for group in self._groups for each in group.release(held)]
        placed.sort(key=itemgetter(0))
        block_ids = [block_id for _, block_id in placed]
        is_released = is_over and held.block_hints.is_released
        mark = self.pool.evict_first if is_released else self.pool.evict_in_turn
        mark(block_ids)
        self.pool.release(block_ids)
        held.block_tables = ()
        held.num_computed_tokens = 0
        held.num_registered_blocks = 0

    def uncache_blocks(self, held: HeldKv) -> None:
        """Remove a request's blocks, including its prefix hits, from the prefix cache.

        Called when the KV of the request may be wrong.
        """
        held.is_registering = False
        for group in self._groups:
            self.prefixes.unregister([block_id for _, block_id in group.cached_blocks(held)])

    def reset(self, holders: Iterable[HeldKv]) -> int:
        """Drop every cached prefix and return the number of blocks they had.

        KV that `holders` compute based on old KV is never cached.
        """
        for held in holders:
            held.is_registering = False
        return self.prefixes.clear()

    def stats_by_group(self, requests: Collection[HeldKv]) -> dict[str, GroupStats]:
        """Return the statistics of each group by its label."""
        return {
            group.label: GroupStats(
                sum(map(group.num_held, requests)),
                self._total_hits[group.number],
                self.prefixes.total_evictions[group.number],
            )
            for group in self._groups
        }

    def check(self, held: Iterable[BlockId], requests: Iterable[HeldKv] = ()) -> None:
        """Raise BlocksUnaccounted unless `held`, one entry per reference, matches the pool.

        Also checks the block tables of the requests, group by group.
        """
        of_passes = itertools.chain.from_iterable(each.blocks_of_passes() for each in self._states)
        self.pool.check([*held, *of_passes])
        self.prefixes.check()
        for each in requests:
            lengths = {len(table) for table in each.block_tables}
            if len(lengths) > 1:
                raise BlocksUnaccounted(f"{each.request_id}: tables of {sorted(lengths)} blocks")
            for group in self._groups:
                group.check(each)
