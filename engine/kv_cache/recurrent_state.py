"""Recurrent state of requests: its blocks while they run, and snapshots of it in the prefix cache.

The state of a request takes the same number of ordinary blocks however long the request is. A
snapshot is a copy at the end of a block of tokens. It is cached as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.core.ids import BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import snapshot_end, snapshot_names
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.plan import BlockIds, StateBlocks


class RecurrentState:
    """Blocks of one request's state. Each pass reads one side and writes the other."""

    __slots__ = ("_num_tokens", "_sides", "num_shared_tokens", "snapshot")

    def __init__(
        self,
        sides: tuple[BlockIds, BlockIds],
        num_tokens: int,
        snapshot: BlockIds = (),
        num_shared_tokens: int = 0,
    ) -> None:
        self._sides = sides
        self._num_tokens = num_tokens  # when the first side was current
        self.snapshot = snapshot  # read by the first pass, and held until that is applied
        self.num_shared_tokens = num_shared_tokens  # whose KV was cached when it was admitted

    @property
    def block_ids(self) -> list[BlockId]:
        return [*self._sides[0], *self._sides[1], *self.snapshot]

    def sides(self, num_computed_tokens: int) -> tuple[BlockIds, BlockIds]:
        """Return both sides, first the one that holds the state after these tokens.

        Each pass since the last chunk computed one token, so that decoding needs no bookkeeping.
        """
        first, second = self._sides
        is_swapped = (num_computed_tokens - self._num_tokens) % 2
        return (second, first) if is_swapped else (first, second)

    def blocks(self, num_computed_tokens: int) -> StateBlocks:
        return StateBlocks(self.sides(num_computed_tokens), self.snapshot)

    def end_chunk(self, num_computed_tokens: int) -> BlockIds:
        """Swap the sides after a prefill chunk. Returns the snapshot that is needed no longer."""
        first, second = self._sides
        self._sides, self._num_tokens = (second, first), num_computed_tokens
        read, self.snapshot = self.snapshot, ()
        return read


class SnapshotCache:
    """Complete snapshots in the prefix cache, by the hash of the block at whose end they are."""

    def __init__(self, pool: BlockPool, num_parts: int) -> None:
        self._pool = pool
        self.num_parts = num_parts
        self._complete: set[BlockHash] = set()

    def __len__(self) -> int:
        return len(self._complete)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._complete

    def find(self, block_hash: BlockHash) -> BlockIds:
        """Return the blocks of a snapshot, without holding them; none if it is not cached."""
        return tuple(self._pool.find(self._names(block_hash)))

    def register(self, block_hash: BlockHash, block_ids: BlockIds) -> bool:
        """Add a snapshot. Returns False if there is one already."""
        if block_hash in self._complete:
            return False
        self._complete.add(block_hash)
        for block_id, name in zip(block_ids, self._names(block_hash), strict=True):
            self._pool.register(block_id, name)
        return True

    def remove(self, hashes: Iterable[BlockHash]) -> None:
        """Remove the snapshots at the ends of these blocks. Their blocks count as evicted."""
        for block_hash in hashes:
            self._pool.unregister(self.find(block_hash))

    def drop_evicted(self, names: Iterable[BlockHash]) -> tuple[BlockHash, ...]:
        """Drop the rest of each snapshot that has lost a block. Returns their hashes."""
        dropped = []
        for name in names:
            block_hash = snapshot_end(name)
            if block_hash is not None and block_hash in self._complete:
                self._complete.remove(block_hash)
                self._pool.unregister(self._blocks_left(block_hash))
                dropped.append(block_hash)
        return tuple(dropped)

    def clear(self) -> None:
        self._complete.clear()

    def check(self) -> None:
        """Raise BlocksUnaccounted unless exactly the blocks of complete snapshots are cached."""
        expected = {name for block_hash in self._complete for name in self._names(block_hash)}
        found = {name for name in self._pool.names if snapshot_end(name) is not None}
        if found != expected:
            raise BlocksUnaccounted(f"snapshots: {len(found)} blocks of {len(expected)} are cached")

    def _blocks_left(self, block_hash: BlockHash) -> list[BlockId]:
        return [
            block_id for name in self._names(block_hash) for block_id in self._pool.find([name])
        ]

    def _names(self, block_hash: BlockHash) -> list[BlockHash]:
        return snapshot_names(block_hash, self.num_parts)
