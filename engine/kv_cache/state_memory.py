"""Memory of the recurrent layers: the same number of blocks per request, however long it is.

A running request has two sides of `num_blocks` blocks: a pass reads one and writes the other, so
that a failed pass can be repeated. Snapshots of the state at some block ends are in the prefix
cache, and a prefix hit of these models ends at one. Without recurrent layers, `num_blocks` is zero,
and all of this does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_search import PrefixHit
from baton.engine.kv_cache.recurrent_state import RecurrentState, SnapshotCache, snapshot_names
from baton.engine.kv_cache.token_group import Allocate


class StateMemory:
    def __init__(self, num_blocks: int, block_size: int, pool: BlockPool) -> None:
        self.num_blocks = num_blocks  # of one state
        self.snapshots = SnapshotCache(pool, num_blocks)
        self._block_size = block_size
        self._pool = pool

    @property
    def num_allocated(self) -> int:
        """The number of blocks that `allocate` takes."""
        return 2 * self.num_blocks

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        """Return the names of the parts of a snapshot at the end of this block."""
        return snapshot_names(block_hash, self.num_blocks)

    def allocate(self, held: HeldKv, hit: PrefixHit, allocate: Allocate) -> None:
        """Give a request that holds the blocks of `hit` both sides of its state."""
        if not self.num_blocks:
            return
        sides = tuple(allocate(self.num_blocks)), tuple(allocate(self.num_blocks))
        num_shared_tokens = hit.num_shared_blocks * self._block_size
        held.state = RecurrentState(
            sides, held.num_computed_tokens, hit.snapshot, num_shared_tokens
        )

    def end_chunk(self, held: HeldKv) -> None:
        """Make the state that a prefill chunk computed the current one."""
        if held.state is not None:
            snapshot = held.state.end_chunk(held.num_computed_tokens)
            if snapshot:
                self._pool.release(snapshot)

    def release(self, held: HeldKv, table: Sequence[BlockId]) -> list[BlockId]:
        """Release both sides. Returns the blocks of a table with the cached snapshots between them.

        The snapshots are held once more. Released with the blocks, each after the block at whose
        end it is, they are evicted in turn with them from the end of the sequence on, so that what
        remains can still be hit.
        """
        if held.state is None:
            return [each for each in table if each != NO_BLOCK]
        self._pool.release(held.state.block_ids)
        held.state = None
        hashes = held.block_hashes[: held.num_computed_tokens // self._block_size]
        block_ids: list[BlockId] = []
        for place, block_id in enumerate(table):
            block_ids += [block_id] if block_id != NO_BLOCK else []
            if place < len(hashes) and hashes[place] in self.snapshots:
                snapshot = self.snapshots.find(hashes[place])
                self._pool.hold(snapshot)
                block_ids += snapshot
        return block_ids

    def uncache(self, held: HeldKv) -> None:
        """Remove the snapshots of a request from the prefix cache."""
        if self.num_blocks:
            num_full = held.num_computed_tokens // self._block_size
            self.snapshots.remove(held.block_hashes[:num_full])

    def num_held(self, held: HeldKv) -> int:
        return 0 if held.state is None else len(held.state.block_ids)

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted if a block of a side is in the prefix cache."""
        for side in held.state.sides(held.num_computed_tokens) if held.state else ():
            if any(self._pool.name_of(block_id) is not None for block_id in side):
                raise BlocksUnaccounted(f"{held.request_id}: a block of its state is cached")

    def __str__(self) -> str:
        return "state"
