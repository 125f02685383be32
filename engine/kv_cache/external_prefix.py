"""Prefixes whose blocks are partly in the prefix cache and partly in an external KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from baton.core.ids import NO_BLOCK, BlockId, BlockName
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.prefix_search import PrefixHit, name_in_group
from baton.engine.kv_cache.recurrent_state import SnapshotCache, snapshot_names
from baton.engine.plan import BlockIds

_EXTERNAL = BlockId(-2)  # instead of a block: the external cache has it
SNAPSHOT = -1  # instead of a group: the block is a part of the snapshot at the end of the prefix


@dataclass(frozen=True, slots=True)
class ExternalPrefix:
    """Blocks of a prefix. Those to be loaded are in the order of the sequence."""

    cached: tuple[BlockId, ...] = ()  # in the prefix cache
    names: tuple[BlockName, ...] = ()  # to be loaded
    groups: tuple[int, ...] = ()  # of each name, or SNAPSHOT
    places: tuple[int, ...] = ()  # of each name, in its block table
    are_cached: tuple[bool, ...] = ()  # by block of both kinds, in the order of the sequence
    num_gained: int = 0  # blocks of tokens that the loads add to the prefix
    num_blocks: int = 0  # blocks of tokens in the whole prefix

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

    @property
    def num_loaded_before_snapshot(self) -> int:
        """The number of blocks to be loaded that are no parts of the snapshot, which come last."""
        return len(self.groups) - self.groups.count(SNAPSHOT)

    def part(self, first: int, end: int | None = None) -> ExternalPrefix:
        """Return a part of the blocks to be loaded."""
        part = slice(first, end)
        return replace(
            self, names=self.names[part], groups=self.groups[part], places=self.places[part]
        )


class Holder(Protocol):
    def holds(self, name: BlockName) -> bool: ...


class HoldsAll:
    """A peer that is said to have all blocks of a prefix."""

    def holds(self, name: BlockName) -> bool:
        return True


class FirstAnswers:
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


class SnapshotsAndExternal:
    """Finds snapshots in the prefix cache or in the external cache. Implements `Snapshots`."""

    def __init__(self, snapshots: SnapshotCache, external: Holder) -> None:
        self._snapshots = snapshots
        self._external = external

    def longest_prefix(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        while num_blocks and not self._has(hashes[num_blocks - 1]):
            num_blocks -= 1
        return num_blocks

    def find(self, block_hash: BlockHash) -> BlockIds:
        if block_hash in self._snapshots:
            return self._snapshots.find(block_hash)
        return (_EXTERNAL,) * self._snapshots.num_parts

    def _has(self, block_hash: BlockHash) -> bool:
        if block_hash in self._snapshots:
            return True
        names = snapshot_names(block_hash, self._snapshots.num_parts)
        return all(map(self._external.holds, names))


def external_prefix(hit: PrefixHit, hashes: Sequence[BlockHash], num_hits: int) -> ExternalPrefix:
    """Split a hit in both caches. `num_hits` blocks are a hit in the prefix cache alone."""
    if hit.num_blocks <= num_hits:
        return ExternalPrefix()
    blocks = list(_in_order(hit, hashes))
    missing = [each for each in blocks if each.block_id == _EXTERNAL]
    return ExternalPrefix(
        cached=tuple(each.block_id for each in blocks if each.block_id != _EXTERNAL),
        names=tuple(each.name for each in missing),
        groups=tuple(each.group for each in missing),
        places=tuple(each.place for each in missing),
        are_cached=tuple(each.block_id != _EXTERNAL for each in blocks),
        num_gained=hit.num_blocks - num_hits,
        num_blocks=hit.num_blocks,
    )


class _Block(NamedTuple):
    name: BlockName
    group: int
    place: int
    block_id: BlockId


def _in_order(hit: PrefixHit, hashes: Sequence[BlockHash]) -> Iterator[_Block]:
    """Yield the blocks of a hit, place after place, and then those of its snapshot."""
    for place in range(hit.num_blocks):
        for group, table in enumerate(hit.block_tables):
            if table[place] != NO_BLOCK:
                yield _Block(name_in_group(hashes[place], group), group, place, table[place])
    if hit.snapshot:
        last = hit.num_blocks - 1
        names = snapshot_names(hashes[last], len(hit.snapshot))
        for name, block_id in zip(names, hit.snapshot, strict=True):
            yield _Block(name, SNAPSHOT, last, block_id)
