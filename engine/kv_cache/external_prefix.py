"""Prefixes whose blocks are partly in the prefix cache and partly in another one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core.ids import BlockId, BlockName
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import snapshot_end
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.cache_group import CacheGroup, NamedBlock, PrefixHit
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_cache import PrefixCache
from baton.engine.kv_cache.prefix_search import PrefixSearch
from baton.engine.kv_cache.state_group import StateGroup
from baton.engine.kv_cache.token_group import TokenGroup
from baton.kv_transfer.external_kv import ExternalKv

_EXTERNAL = BlockId(-2)  # instead of a block: the external cache has it


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
    # a snapshot, is of use only as a whole, with everything before it.
    num_independent: int = 0

    def token_ranges(self, block_size: int) -> list[range | None]:
        """Return the tokens of each block to be loaded, if it is in the first group."""
        return [
            None if group else range(place * block_size, (place + 1) * block_size)
            for group, place in zip(self.groups, self.places, strict=True)
        ]

    def with_loaded(self, block_ids: Sequence[BlockId]) -> list[BlockId]:
        """Return the blocks of the prefix in order, with `block_ids` for those to be loaded."""
        cached, loaded = iter(self.cached), iter(block_ids)
        return [next(cached if is_cached else loaded) for is_cached in self.are_cached]

    def part(self, first: int, end: int | None = None) -> ExternalPrefix:
        """Return a part of the blocks to be loaded."""
        names = self.names[first:end]
        return replace(
            self,
            names=names,
            groups=self.groups[first:end],
            places=self.places[first:end],
            num_independent=max(0, min(self.num_independent - first, len(names))),
        )


class Holder(Protocol):
    def holds(self, name: BlockName) -> bool: ...


class HoldsAll:
    """A peer that is said to have all blocks of a prefix."""

    def holds(self, name: BlockName) -> bool:
        return True


class AnswerCache:
    """External cache whose first answer about a block holds for a whole search.

    A search asks for a block more than once, and the cache may lose it in between.
    """

    def __init__(self, external: Holder) -> None:
        self._external = external
        self._answers: dict[BlockName, bool] = {}

    def begin_search(self) -> None:
        self._answers.clear()

    def holds(self, name: BlockName) -> bool:
        is_held = self._answers.get(name)
        if is_held is None:
            is_held = self._answers[name] = self._external.holds(name)
        return is_held


class PoolAndExternal:
    """Finds blocks in the pool or in the external cache. Implements `CachedBlocks`."""

    def __init__(self, pool: BlockPool, external: Holder) -> None:
        self._pool = pool
        self._external = external

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        found = []
        for block_hash in hashes:
            in_pool = self._pool.find([block_hash])
            if not in_pool and not self._external.holds(block_hash):
                break
            found.append(in_pool[0] if in_pool else _EXTERNAL)
        return found

    def is_cached(self, block_hash: BlockHash) -> bool:
        return self._pool.is_cached(block_hash) or self._external.holds(block_hash)


def external_prefix(
    groups: Sequence[CacheGroup], hit: PrefixHit, hashes: Sequence[BlockHash], num_hits: int
) -> ExternalPrefix:
    """Split a hit in both caches. `num_hits` blocks are a hit in the prefix cache alone."""
    if hit.num_blocks <= num_hits:
        return ExternalPrefix()
    blocks = _in_order(groups, hit, hashes[: hit.num_blocks])
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
    groups: Sequence[CacheGroup], hit: PrefixHit, hashes: Sequence[BlockHash]
) -> list[tuple[CacheGroup, NamedBlock]]:
    """Return the blocks of a hit, place after place, and for each the groups in turn."""
    blocks = [
        (group, block)
        for group, block_ids in zip(groups, hit.blocks, strict=True)
        for block in group.named_blocks(hashes, block_ids)
    ]
    blocks.sort(key=lambda each: each[1].place)  # stable
    return blocks


class ExternalPrefixes:
    """Prefixes that an external KV cache or a peer makes longer, and the blocks from there."""

    def __init__(
        self,
        prefixes: PrefixCache,
        tables: Sequence[TokenGroup],
        groups: Sequence[CacheGroup],
        states: StateGroup | None,
        search: PrefixSearch,
        external: ExternalKv | None,
    ) -> None:
        self._prefixes = prefixes
        self._tables = tables
        self._groups = groups
        self._states = states
        self._search = search
        self._promised_search = self._search_with(HoldsAll())
        self._external: AnswerCache | None = None
        if external is not None:
            self._external = AnswerCache(external)
            self._external_search = self._search_with(self._external)

    def find_external(
        self, held: HeldKv, max_num_tokens: int, *, continues_at: int | None = None
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and the external one together.

        `continues_at` is that of `find_prefix`.
        """
        if self._external is None:
            return ExternalPrefix()
        self._external.begin_search()
        hashes = self._prefixes.hashes_within(held, max_num_tokens)
        hit = self._external_search.find(hashes, continues_at)
        num_hits = self._search.find(hashes, continues_at).num_blocks
        return external_prefix(self._groups, hit, hashes, num_hits)

    def find_promised(
        self, held: HeldKv, max_num_tokens: int, num_promised_tokens: int
    ) -> ExternalPrefix:
        """Return the longest prefix in the prefix cache and a peer that has these leading tokens.

        With recurrent layers, the peer has a snapshot at their end, and no other.
        """
        if self._states is not None and num_promised_tokens > max_num_tokens:
            return ExternalPrefix()
        hashes = self._prefixes.hashes_within(held, max_num_tokens)
        hit = self._promised_search.find(
            hashes[: num_promised_tokens // self._prefixes.block_size], None
        )
        num_hits = self._search.find(hashes, None).num_blocks
        return external_prefix(self._groups, hit, hashes, num_hits)

    def register_loaded(
        self,
        held: HeldKv,
        prefix: ExternalPrefix,
        block_ids: Sequence[BlockId],
        are_loaded: Sequence[bool],
    ) -> None:
        """Add the loaded blocks of a request's prefix to the prefix cache."""
        placed = map(NamedBlock, prefix.places, map(BlockHash, prefix.names), block_ids)
        loaded = itertools.compress(zip(prefix.groups, placed, strict=True), are_loaded)
        # Consecutive blocks of a group together: the parts of a snapshot are cached as a whole.
        for number, run in itertools.groupby(loaded, key=lambda each: each[0]):
            self._groups[number].register_loaded(held, [block for _, block in run])

    def register_named(
        self,
        names: Sequence[BlockName],
        block_ids: Sequence[BlockId],
        are_loaded: Sequence[bool],
    ) -> None:
        """Add loaded blocks to the prefix cache whose tokens are not known here.

        No event names them: the external cache that held them does, and it need not store them.
        """
        loaded = [
            (BlockHash(name), block_id)
            for name, block_id, is_loaded in zip(names, block_ids, are_loaded, strict=True)
            if is_loaded
        ]
        for name, block_id in loaded:
            if snapshot_end(name) is None:
                self._prefixes.pool.register(block_id, name)
        if self._states is not None:
            self._states.register_parts(loaded)

    def store_hits(self, held: HeldKv, num_hits: int) -> None:
        """Queue the prefix hits of a request to be stored outside, where they may be missing."""
        for group, table in zip(self._tables, held.block_tables, strict=False):  # or no table yet
            for block in group.named_blocks(held.block_hashes, table[:num_hits]):
                self._prefixes.queue_unstored(held, block.block_id, block.name)

    def names_of(self, held: HeldKv, num_blocks: int | None = None) -> list[BlockHash]:
        """Return the names of the first full blocks of a request, or of all of them.

        They include those of every group, and of snapshots.
        """
        return [
            name
            for block_hash in held.block_hashes[:num_blocks]
            for group in self._groups
            for name in group.names(block_hash)
        ]

    def _search_with(self, outside: Holder) -> PrefixSearch:
        """Return a search for prefixes in the prefix cache and another cache together."""
        both = PoolAndExternal(self._prefixes.pool, outside)
        return PrefixSearch(both, self._tables, self._groups, self._prefixes.block_size)
