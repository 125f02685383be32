"""Memory of the layers that need the same tokens: all of them, a window, or a chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_search import name_in_group

Allocate = Callable[[int], list[BlockId]]  # the caller has checked that so many are free


class TokenGroup:
    """One KV group. Each request has a block table in it, with an entry for each block of tokens.

    With blocks of 2 tokens and a window of 3, a request of 7 tokens may have the table
    `[-1, -1, 5, 8]`: the next token, number 7, attends to tokens 5 and 6, in the blocks 5 and 8.
    The first two blocks were released, or never allocated on a node that received the KV.
    """

    def __init__(self, number: int, spec: KvCacheSpec, block_size: int, pool: BlockPool) -> None:
        self.number = number
        self.spec = spec
        self._block_size = block_size
        self._pool = pool

    def name(self, block_hash: BlockHash) -> BlockHash:
        return name_in_group(block_hash, self.number)

    def first_seen(self, position: int) -> int:
        """Return the first place of a table that tokens from `position` on attend to."""
        return self.spec.num_unseen(position) // self._block_size

    def num_allocated(self, num_blocks: int, num_hits: int, position: int) -> int:
        """Return the number of blocks that `table` allocates."""
        return num_blocks - max(num_hits, self.first_seen(position))

    def table(
        self, cached: list[BlockId], num_blocks: int, position: int, allocate: Allocate
    ) -> list[BlockId]:
        """Complete a table of cached blocks. The next token computed here is at `position`."""
        num_unseen = max(0, self.first_seen(position) - len(cached))
        num_allocated = num_blocks - len(cached) - num_unseen
        return [*cached, *[NO_BLOCK] * num_unseen, *allocate(num_allocated)]

    def release_unseen(self, held: HeldKv) -> None:
        """Release the blocks that no later token of the request attends to."""
        end = self.first_seen(held.num_computed_tokens)
        table = held.block_tables[self.number]
        first = end
        while first and table[first - 1] != NO_BLOCK:
            first -= 1
        self._pool.release(table[first:end])
        table[first:end] = [NO_BLOCK] * (end - first)

    def num_held(self, held: HeldKv) -> int:
        if not held.block_tables:
            return 0
        table = held.block_tables[self.number]
        return len(table) - table.count(NO_BLOCK)

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
            name = None if block_id == NO_BLOCK else self._pool.name_of(block_id)
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

    def __str__(self) -> str:
        return f"{self.number} {self.spec}"
