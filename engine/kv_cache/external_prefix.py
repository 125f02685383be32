"""Prefixes whose blocks are partly in the prefix cache and partly in another one."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId, BlockName
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import group_of
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.cache_group import CacheGroup, NamedBlock, PrefixHit, PrefixSearch
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_cache import PrefixCache

_EXTERNAL = BlockId(-2)  # instead of a block: the other cache has it


@dataclass(frozen=True, slots=True)
class ExternalPrefix:
    """Blocks of a prefix. Those to be loaded are in the order of the sequence."""

    cached: tuple[BlockId, ...] = ()  # in the prefix cache
    names: tuple[BlockName, ...] = ()  # to be loaded
    groups: tuple[int, ...] = ()  # of each name
    places: tuple[int, ...] = ()  # of each name, in its block table
    are_cached: tuple[bool, ...] = ()  # by block of both kinds, in the order of the sequence
    num_gained: int = 0  # blocks of tokens that the loads add to the prefix
    num_blocks: int = 0  # blocks of tokens in the whole prefix
    # Leading names whose blocks are each of use without the others. The rest, such as the parts of
    # a recurrent state, is of use only as a whole, with everything before it.
    num_independent: int = 0

    def with_loaded(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Return the blocks of the prefix in order, with `block_ids` for those to be loaded."""
        cached, loaded = iter(self.cached), iter(block_ids)
        return [next(cached if is_cached else loaded) for is_cached in self.are_cached]


class PoolAndExternal:
    """Finds blocks in the pool or in another cache. Implements `CachedBlocks` for one search."""

    def __init__(self, pool: BlockPool, holds: Callable[[BlockName], bool]) -> None:
        self._pool = pool
        # The first answer about a block holds for the whole search, which asks more than once: the
        # other cache may lose it in between.
        self._holds = functools.cache(holds)

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        found = []
        for block_hash in hashes:
            in_pool = self._pool.find([block_hash])
            if not in_pool and not self._holds(block_hash):
                break
            found.append(in_pool[0] if in_pool else _EXTERNAL)
        return found

    def is_cached(self, block_hash: BlockHash) -> bool:
        return self._pool.is_cached(block_hash) or self._holds(block_hash)


@dataclass(frozen=True, slots=True, eq=False)
class ExternalPrefixes:
    """Prefixes that an external KV cache or a peer makes longer, and the blocks from there."""

    prefixes: PrefixCache
    groups: Sequence[CacheGroup]
    search: PrefixSearch

    def find_held(
        self,
        held: HeldKv,
        max_num_tokens: int,
        holds: Callable[[BlockName], bool],
        *,
        continues_at: int | None = None,
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and one that `holds` blocks, together.

        `continues_at` is that of `find_prefix`.
        """
        hashes = self.prefixes.hashes_within(held, max_num_tokens)
        return self._find(hashes, len(hashes), holds, continues_at)

    def find_promised(
        self, held: HeldKv, max_num_tokens: int, num_promised_tokens: int
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and a peer that has these leading tokens.

        With recurrent layers, the peer has a state at their end, and no other.
        """
        if self.prefixes.has_state and num_promised_tokens > max_num_tokens:
            return ExternalPrefix()
        hashes = self.prefixes.hashes_within(held, max_num_tokens)
        num_promised = num_promised_tokens // self.prefixes.block_size
        return self._find(hashes, num_promised, lambda _: True)

    def register_loaded(
        self,
        held: HeldKv | None,
        prefix: ExternalPrefix,
        block_ids: Sequence[BlockId],
        loaded: Iterable[int],
    ) -> None:
        """Add loaded blocks of a prefix, by their indices, to the prefix cache."""
        # Consecutive blocks of a group together: the parts of a state are cached as a whole.
        for number, run in itertools.groupby(loaded, key=prefix.groups.__getitem__):
            blocks = [
                NamedBlock(prefix.places[index], BlockHash(prefix.names[index]), block_ids[index])
                for index in run
            ]
            self.groups[number].register_loaded(held, blocks)

    def group_of(self, name: BlockName) -> int:
        """Return the number of the group that a block of this name belongs to."""
        # A peer may request names that no group gives.
        return min(group_of(name), self.groups[-1].number)

    def store_hits(self, held: HeldKv, num_hits: int) -> None:
        """Queue the prefix hits of a request to be stored outside, where they may be missing."""
        for group, table in zip(self.groups, held.block_tables, strict=False):  # or no table yet
            for block in group.named_blocks(held.block_hashes, table[:num_hits]):
                self.prefixes.queue_unstored(held, block.block_id, block.name)

    def names_of(self, held: HeldKv, num_blocks: int | None = None) -> list[BlockHash]:
        """Return the names of the first full blocks of a request, or of all of them.

        They include those of every group.
        """
        return [
            name
            for block_hash in held.block_hashes[:num_blocks]
            for group in self.groups
            for name in group.names(block_hash)
        ]

    def _find(
        self,
        hashes: Sequence[BlockHash],
        num_held: int,
        holds: Callable[[BlockName], bool],
        continues_at: int | None = None,
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and one that `holds` these blocks."""
        pool = self.prefixes.pool
        hit = self.search.find(PoolAndExternal(pool, holds), hashes[:num_held], continues_at)
        num_hits = self.search.find(pool, hashes, continues_at).num_blocks
        if hit.num_blocks <= num_hits:
            return ExternalPrefix()
        blocks = self._in_order(hit, hashes[: hit.num_blocks])
        missing = [each for each in blocks if each[1].block_id == _EXTERNAL]
        return ExternalPrefix(
            cached=tuple(block.block_id for _, block in blocks if block.block_id != _EXTERNAL),
            names=tuple(block.name for _, block in missing),
            groups=tuple(group.number for group, _ in missing),
            places=tuple(block.place for _, block in missing),
            are_cached=tuple(block.block_id != _EXTERNAL for _, block in blocks),
            num_gained=hit.num_blocks - num_hits,
            num_blocks=hit.num_blocks,
            num_independent=sum(not group.is_all_or_nothing for group, _ in missing),
        )

    def _in_order(
        self, hit: PrefixHit, hashes: Sequence[BlockHash]
    ) -> list[tuple[CacheGroup, NamedBlock]]:
        """Return the blocks of a hit, place after place, and for each the groups in turn."""
        blocks = [
            (group, block)
            for group, block_ids in zip(self.groups, hit.blocks, strict=True)
            for block in group.named_blocks(hashes, block_ids)
        ]
        blocks.sort(key=lambda each: each[1].place)  # stable
        return blocks
