"""Search for cached prefixes over all KV groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from baton.core.ids import NO_BLOCK, BlockId, existing_blocks
from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.plan import BlockIds


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a prefix, by group. The request does not hold them yet."""

    num_blocks: int  # entries of each table
    block_tables: tuple[list[BlockId], ...]
    snapshot: BlockIds = ()  # of the recurrent state at its end
    num_shared_blocks: int = 0  # entries that all groups have, with or without a snapshot

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks of all groups, and of the snapshot."""
        return [*existing_blocks(self.block_tables), *self.snapshot]


def name_in_group(block_hash: BlockHash, group: int) -> BlockHash:
    """Return the name of a block of this group. The first group's is the hash itself."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def is_of_first_group(name: BlockHash) -> bool:
    return len(name) == HASH_BYTES


def group_of(name: BlockHash) -> int | None:
    """Return the group of a block of tokens, or None for a part of a snapshot."""
    if len(name) > HASH_BYTES + 1:
        return None
    return name[HASH_BYTES] if len(name) > HASH_BYTES else 0


class CachedBlocks(Protocol):
    """Blocks by name: the pool's, or those of another cache as well."""

    def find(self, hashes: Iterable[BlockHash]) -> list[BlockId]: ...

    def is_cached(self, block_hash: BlockHash) -> bool: ...


class Snapshots(Protocol):
    """Snapshots of recurrent states: those of the prefix cache, or of another cache as well."""

    def longest_prefix(self, hashes: Sequence[BlockHash], num_blocks: int) -> int: ...

    def find(self, block_hash: BlockHash) -> BlockIds: ...


class PrefixSearch:
    def __init__(
        self,
        pool: CachedBlocks,
        specs: Sequence[KvCacheSpec],
        block_size: int,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._pool = pool
        self._snapshots = snapshots  # of models with recurrent layers
        self._specs = tuple(specs)
        self._block_size = block_size
        self._groups = range(len(self._specs))
        self._has_one_full_group = len(specs) == 1 and not specs[0].forgets

    def find(self, hashes: Sequence[BlockHash], continues_at: int | None) -> PrefixHit:
        """Return the longest prefix of which each group has the blocks that it needs.

        A group with windows needs those that tokens from `continues_at` attend to, or by default
        those that the tokens after the prefix do. Recurrent layers need a snapshot at the end of
        the prefix, unless another node continues it.
        """
        snapshots = self._snapshots if continues_at is None else None
        if self._has_one_full_group and snapshots is None:
            found = self._pool.find(hashes)
            return PrefixHit(len(found), (found,))
        num_blocks = num_shared = self._longest(hashes, len(hashes), continues_at)
        if snapshots is not None:
            num_blocks = self._longest_with_snapshot(hashes, num_shared, snapshots)
        tables = [self._table(hashes, each, num_blocks, continues_at) for each in self._groups]
        hit = PrefixHit(num_blocks, tuple(tables), num_shared_blocks=num_shared)
        if snapshots is not None and num_blocks:
            hit = replace(hit, snapshot=snapshots.find(hashes[num_blocks - 1]))
        # Without blocks, the prefix is not cached: the next token just does not attend to it.
        if hit.block_ids:
            return hit
        return replace(hit, num_blocks=0, block_tables=tuple([] for _ in self._groups))

    def _longest(
        self, hashes: Sequence[BlockHash], num_blocks: int, continues_at: int | None
    ) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that all groups can serve."""
        num_before = -1
        while num_blocks != num_before:
            num_before = num_blocks
            for group in self._groups:
                num_blocks = self._shorten(hashes, group, num_blocks, continues_at)
        return num_blocks

    def _longest_with_snapshot(
        self, hashes: Sequence[BlockHash], num_blocks: int, snapshots: Snapshots
    ) -> int:
        num_before = -1
        while num_blocks != num_before:
            num_before = snapshots.longest_prefix(hashes, num_blocks)
            num_blocks = self._longest(hashes, num_before, None)
        return num_blocks

    def _shorten(
        self, hashes: Sequence[BlockHash], group: int, num_blocks: int, continues_at: int | None
    ) -> int:
        """Return the longest prefix of at most `num_blocks` blocks that the group can serve."""
        if not self._specs[group].forgets:
            names = (name_in_group(each, group) for each in hashes[:num_blocks])
            return len(self._pool.find(names))
        place = num_blocks
        while place > self._first_seen(group, num_blocks, continues_at):
            place -= 1
            if not self._pool.is_cached(name_in_group(hashes[place], group)):
                num_blocks = place
        return num_blocks

    def _table(
        self, hashes: Sequence[BlockHash], group: int, num_blocks: int, continues_at: int | None
    ) -> list[BlockId]:
        first = min(num_blocks, self._first_seen(group, num_blocks, continues_at))
        names = (name_in_group(each, group) for each in hashes[first:num_blocks])
        return [NO_BLOCK] * first + self._pool.find(names)

    def _first_seen(self, group: int, num_blocks: int, continues_at: int | None) -> int:
        position = num_blocks * self._block_size if continues_at is None else continues_at
        return self._specs[group].num_unseen(position) // self._block_size
