"""Memory of the layers that need the same tokens: all of them, a window, or a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.engine.kv_cache.block_names import name_in_group
from baton.engine.kv_cache.cache_group import CacheGroup, NamedBlock, PrefixHit, PrefixQuery
from baton.engine.kv_cache.groups import CacheLayout, KvCacheSpec
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_cache import PrefixCache


class TokenGroup(CacheGroup):
    """Layers with full attention.

    Each request has a block table in it, with an entry for each block of tokens.
    """

    is_all_or_nothing = False

    def __init__(self, number: int, spec: KvCacheSpec, cache: PrefixCache) -> None:
        self.number = number
        self.label = f"{number} {spec}"
        self.spec = spec
        self.forgets = spec.forgets
        self._cache = cache
        self._block_size = cache.block_size
        # Routers know the names of the first group alone, and with recurrent layers none of these.
        self._reports = number == 0 and not cache.has_state

    def name(self, block_hash: BlockHash) -> BlockHash:
        return name_in_group(block_hash, self.number)

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        return [self.name(block_hash)]

    def first_seen(self, position: int) -> int:
        """Return the first place of a table that tokens from `position` on attend to."""
        return self.spec.num_unseen(position) // self._block_size

    # --- prefix hits --------------------------------------------------------------

    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        return len(query.cached.find(self._names(query.hashes[:num_blocks])))

    def find(self, query: PrefixQuery, num_blocks: int) -> list[BlockId]:
        first = min(num_blocks, self._first_seen_after(query, num_blocks))
        names = self._names(query.hashes[first:num_blocks])
        return [NO_BLOCK] * first + query.cached.find(names)

    def named_blocks(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[NamedBlock]:
        for place, block_id in enumerate(block_ids):
            if block_id != NO_BLOCK:
                yield NamedBlock(place, self.name(hashes[place]), block_id)

    def _names(self, hashes: Sequence[BlockHash]) -> Iterable[BlockHash]:
        return map(self.name, hashes) if self.number else hashes

    def _first_seen_after(self, query: PrefixQuery, num_blocks: int) -> int:
        """Return the first place that the tokens after a prefix attend to."""
        position = query.continues_at
        return self.first_seen(num_blocks * self._block_size if position is None else position)

    # --- blocks of a request ------------------------------------------------------

    def num_allocated(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> int:
        return num_blocks - max(hit.num_blocks, self.first_seen(hit.position))

    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> None:
        cached = hit.blocks[self.number]
        # A peer sends what the next token attends to, and nothing in front of it.
        num_unseen = max(0, self.first_seen(hit.position) - len(cached))
        allocated = self._cache.allocate(num_blocks - len(cached) - num_unseen)
        held.block_tables += ([*cached, *[NO_BLOCK] * num_unseen, *allocated],)

    def cached_blocks(self, held: HeldKv) -> Iterable[tuple[int, BlockId]]:
        table = held.block_tables[self.number] if held.block_tables else ()
        return ((place, block) for place, block in enumerate(table) if block != NO_BLOCK)

    def num_held(self, held: HeldKv) -> int:
        if not held.block_tables:
            return 0
        table = held.block_tables[self.number]
        return len(table) - table.count(NO_BLOCK)

    # --- the prefix cache ---------------------------------------------------------

    def register(self, held: HeldKv, first: int, end: int) -> None:
        table, hashes = held.block_tables[self.number], held.block_hashes
        run_start = first  # of blocks that are new: an event names consecutive ones
        for place in range(first, end):
            block_id, name = table[place], self.name(hashes[place])
            if block_id == NO_BLOCK or not self._cache.register(held, block_id, name):
                self._report(held, run_start, place)
                run_start = place + 1
        self._report(held, run_start, end)

    def register_block(self, held: HeldKv, place: int, block_id: BlockId) -> None:
        """Add a block that the request need not hold to the prefix cache."""
        if self._cache.register(held, block_id, self.name(held.block_hashes[place])):
            self._report(held, place, place + 1)

    def register_loaded(self, held: HeldKv | None, blocks: Sequence[NamedBlock]) -> None:
        for block in blocks:
            if held is not None:
                self.register_block(held, block.place, block.block_id)
            elif block.name == self.name(BlockHash(block.name[:HASH_BYTES])):
                # Not if a peer made up the name.
                self._cache.pool.register(block.block_id, block.name)

    def _report(self, held: HeldKv, start: int, end: int) -> None:
        if self._reports:
            self._cache.report_stored(held, start, end)

    # --- invariants ---------------------------------------------------------------

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted unless the request has the blocks that it needs of the group.

        Only the blocks that no later token attends to are missing, and a cached block has the name
        of its group and place.
        """
        if not held.block_tables:
            return
        table = held.block_tables[self.number]
        where = f"{held.request_id}, group {self.number} ({self.spec})"
        self._check_missing(where, table, self.first_seen(held.num_tokens))
        for place, (block_id, block_hash) in enumerate(zip(table, held.block_hashes, strict=False)):
            name = None if block_id == NO_BLOCK else self._cache.pool.name_of(block_id)
            if name is not None and name != self.name(block_hash):
                raise BlocksUnaccounted(
                    f"{where}: block {block_id} at place {place} is cached as {name.hex()}"
                )

    def _check_missing(self, where: str, table: Sequence[BlockId], num_unseen: int) -> None:
        num_missing = table.count(NO_BLOCK)
        if num_missing > num_unseen or NO_BLOCK in table[num_missing:]:
            raise BlocksUnaccounted(
                f"{where}: {num_missing} blocks are missing, {num_unseen} unseen"
            )


class WindowGroup(TokenGroup):
    """Layers whose tokens attend to a window, or to their own chunk.

    With blocks of 2 tokens and a window of 3, a request of 7 tokens may have the table
    `[-1, -1, 5, 8]`: the next token, number 7, attends to tokens 5 and 6, in the blocks 5 and 8.
    The first two blocks were released, or never allocated on a node that received the KV.
    """

    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        # From the end on: a missing block moves the end of the prefix, and the window with it.
        place = num_blocks
        while place > self._first_seen_after(query, num_blocks):
            place -= 1
            if not query.cached.is_cached(self.name(query.hashes[place])):
                num_blocks = place
        return num_blocks

    def release_unseen(self, held: HeldKv) -> None:
        end = self.first_seen(held.num_computed_tokens)
        table = held.block_tables[self.number]
        first = end
        while first and table[first - 1] != NO_BLOCK:
            first -= 1
        self._cache.pool.release(table[first:end])
        table[first:end] = [NO_BLOCK] * (end - first)


def token_groups(layout: CacheLayout, cache: PrefixCache) -> tuple[TokenGroup, ...]:
    return tuple(
        (WindowGroup if group.spec.forgets else TokenGroup)(number, group.spec, cache)
        for number, group in enumerate(layout.groups)
    )
