"""Search for cached prefixes over all KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.groups import KvCacheSpec
from engine.kv_cache.recurrent_state import SnapshotCache
from engine.plan import BlockIds
from kv_transfer.types import NO_BLOCK, BlockId, existing_blocks


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks of a prefix, by group. The request does not hold them yet."""

    num_blocks: int  # entries of each table
    block_tables: tuple[list[BlockId], ...]
    snapshot: BlockIds = ()  # of the recurrent state at its end

    @property
    def block_ids(self) -> list[BlockId]:
        """The blocks of all groups, and of the snapshot."""
        return [*existing_blocks(self.block_tables), *self.snapshot]


def name_in_group(block_hash: BlockHash, group: int) -> BlockHash:
    """Return the name of a block of this group. The first group's is the hash itself."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def is_of_first_group(name: BlockHash) -> bool:
    return len(name) == HASH_BYTES


class PrefixSearch:
    def __init__(
        self,
        pool: BlockPool,
        specs: Sequence[KvCacheSpec],
        block_size: int,
        snapshots: SnapshotCache | None = None,
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
        num_blocks, num_before = len(hashes), -1
        while num_blocks != num_before:
            num_before = num_blocks
            for group in self._groups:
                num_blocks = self._shorten(hashes, group, num_blocks, continues_at)
            if snapshots is not None:
                num_blocks = snapshots.longest_prefix(hashes, num_blocks)
        tables = [self._table(hashes, each, num_blocks, continues_at) for each in self._groups]
        hit = PrefixHit(num_blocks, tuple(tables))
        if snapshots is not None and num_blocks:
            hit = replace(hit, snapshot=snapshots.find(hashes[num_blocks - 1]))
        # Without blocks, the prefix is not cached: the next token just does not attend to it.
        return hit if hit.block_ids else PrefixHit(0, tuple([] for _ in self._groups))

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
