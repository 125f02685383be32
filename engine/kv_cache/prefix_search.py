"""Search for cached prefixes over all groups."""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import existing_blocks
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.cache_group import CachedBlocks, CacheGroup, PrefixHit, PrefixQuery


class PrefixSearch:
    """Longest prefix that all groups can continue, each with the blocks that it needs."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int) -> None:
        self._groups = groups
        self._tables = [group for group in groups if not group.is_all_or_nothing]
        self._block_size = block_size
        self._has_one_full_group = len(groups) == 1 and not groups[0].forgets

    def find(
        self, cached: CachedBlocks, hashes: Sequence[BlockHash], continues_at: int | None = None
    ) -> PrefixHit:
        """Return the longest prefix of which each group has the blocks that it needs.

        A group with windows needs those that tokens from `continues_at` attend to, or by default
        those that the tokens after the prefix do. Recurrent layers need their state at the end of
        the prefix, unless another node continues it.
        """
        num_shared = 0
        if self._has_one_full_group:  # as in most models
            found = cached.find(hashes)
            num_blocks, blocks = len(found), [found]
        else:
            query = PrefixQuery(cached, hashes, continues_at)
            num_shared = num_blocks = self._longest(self._tables, query, len(hashes))
            if len(self._groups) > len(self._tables):
                num_blocks = self._longest(self._groups, query, num_shared)
            blocks = [group.find(query, num_blocks) for group in self._groups]
            # Without blocks, the prefix is not cached: the next token just does not attend to it.
            if next(existing_blocks(blocks), None) is None:
                num_blocks, blocks = 0, [[] for _ in self._groups]
        position = num_blocks * self._block_size if continues_at is None else continues_at
        return PrefixHit(num_blocks, tuple(blocks), position, num_shared)

    def _longest(self, groups: Sequence[CacheGroup], query: PrefixQuery, num_blocks: int) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that these groups can continue.

        What one group shortens, another one may have to shorten further, such as to an earlier
        state, and the first one after that: so all are asked until nothing changes.
        """
        num_before = None
        while num_blocks != num_before:
            num_before = num_blocks
            for group in groups:
                num_blocks = group.longest_prefix(query, num_blocks)
        return num_blocks
