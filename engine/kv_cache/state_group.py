"""Memory of the recurrent layers: the same number of blocks per request, however long it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.core.ids import NO_BLOCK, BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import snapshot_end, snapshot_name, snapshot_names
from baton.engine.kv_cache.cache_group import CachedBlocks, NamedBlock, PrefixHit, PrefixQuery
from baton.engine.kv_cache.groups import NUM_STATE_COPIES
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.prefix_cache import PrefixCache
from baton.engine.kv_cache.recurrent_state import RecurrentState
from baton.engine.plan import BlockIds, StateSnapshot


class StateGroup:
    """The recurrent layers of a model. Implements `CacheGroup`.

    A running request has two sides of `num_blocks` blocks each: a pass reads one and writes the
    other. A state cannot be cut at an earlier token. So snapshots of it at the ends of some blocks
    are in the prefix cache, and a prefix hit of these models ends at one.

    With states of 2 blocks, a request may hold the sides (4, 5) and (6, 7). A snapshot of it after
    32 tokens in blocks 8 and 9 is named by the hash of the block that ends with the 32nd token. A
    later request with these tokens holds 8 and 9 until its first pass has read them.
    """

    is_all_or_nothing = True

    def __init__(self, number: int, num_blocks: int, cache: PrefixCache) -> None:
        self.number = number
        self.num_blocks = num_blocks  # of one state
        self._cache = cache
        self._block_size = cache.block_size

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        return snapshot_names(block_hash, self.num_blocks)

    # --- prefix hits --------------------------------------------------------------

    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        if query.continues_at is not None:
            return num_blocks  # the state comes from the node that computes the tokens in between
        while num_blocks and not self._is_cached(query.cached, query.hashes[num_blocks - 1]):
            num_blocks -= 1
        return num_blocks

    def find(self, query: PrefixQuery, num_blocks: int) -> list[BlockId]:
        if not num_blocks or query.continues_at is not None:
            return []
        return query.cached.find(self.names(query.hashes[num_blocks - 1]))

    def named_blocks(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[NamedBlock]:
        last = len(hashes) - 1
        for part, block_id in enumerate(block_ids):
            yield NamedBlock(last, snapshot_name(hashes[last], part), block_id)

    def _is_cached(self, cached: CachedBlocks, block_hash: BlockHash) -> bool:
        return all(
            cached.is_cached(snapshot_name(block_hash, part)) for part in range(self.num_blocks)
        )

    # --- blocks of a request ------------------------------------------------------

    def num_allocated(self, hit: PrefixHit, num_blocks: int) -> int:
        return NUM_STATE_COPIES * self.num_blocks

    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> None:
        held.state = RecurrentState(
            (self._allocate(), self._allocate()),
            held.num_computed_tokens,
            tuple(hit.blocks[self.number]),
            hit.num_shared_blocks * self._block_size,
        )

    def end_chunk(self, held: HeldKv) -> None:
        """Make the state that a prefill chunk computed the current one."""
        if held.state is not None:
            snapshot = held.state.end_chunk(held.num_computed_tokens)
            if snapshot:
                self._cache.pool.release(snapshot)

    def release(self, held: HeldKv, table: Sequence[BlockId]) -> list[BlockId]:
        """Release both sides. Returns the blocks of a table with the cached snapshots between them.

        The snapshots are held once more. Released with the blocks, each after the block at whose
        end it is, they are evicted in turn with them from the end of the sequence on, so that what
        remains can still be hit.
        """
        if held.state is None:
            return []
        pool, snapshots = self._cache.pool, self._cache.snapshots
        pool.release(held.state.block_ids)
        held.state = None
        hashes = held.block_hashes[: held.num_computed_tokens // self._block_size]
        block_ids: list[BlockId] = []
        for place, block_id in enumerate(table):
            block_ids += [block_id] if block_id != NO_BLOCK else []
            if place < len(hashes) and hashes[place] in snapshots:
                snapshot = snapshots.find(hashes[place])
                pool.hold(snapshot)
                block_ids += snapshot
        return block_ids

    def num_held(self, held: HeldKv) -> int:
        return 0 if held.state is None else len(held.state.block_ids)

    # --- snapshots ----------------------------------------------------------------

    def allocate_snapshot(self, held: HeldKv, num_tokens: int) -> StateSnapshot | None:
        """Allocate the blocks of a snapshot after these tokens of the request.

        Returns None if it would not be cached, is cached already, or there are too few blocks.
        """
        if not held.is_registering or self._cache.pool.num_free < self.num_blocks:
            return None
        held.extend_hashes(self._block_size)
        end = held.block_hashes[num_tokens // self._block_size - 1]
        return None if end in self._cache.snapshots else StateSnapshot(num_tokens, self._allocate())

    def register_snapshot(self, held: HeldKv, snapshot: StateSnapshot) -> None:
        """Add a snapshot to the prefix cache."""
        if held.is_registering:
            self._register(held, snapshot.num_tokens // self._block_size, snapshot.block_ids)

    def register_loaded(self, held: HeldKv, blocks: Sequence[NamedBlock]) -> None:
        if len(blocks) == self.num_blocks:
            block_ids = tuple(block.block_id for block in blocks)
            self._register(held, blocks[0].place + 1, block_ids)

    def register_parts(self, blocks: Iterable[tuple[BlockHash, BlockId]]) -> None:
        """Add the snapshots of which all parts are given, without a request that has the tokens."""
        parts: dict[BlockHash, dict[BlockHash, BlockId]] = {}  # by the end of the snapshot
        for name, block_id in blocks:
            end = snapshot_end(name)
            if end is not None:
                parts.setdefault(end, {})[name] = block_id
        for end, found in parts.items():
            if len(found) == self.num_blocks:
                self._cache.snapshots.register(end, tuple(found[name] for name in sorted(found)))

    def _register(self, held: HeldKv, num_blocks: int, block_ids: BlockIds) -> None:
        end = held.block_hashes[num_blocks - 1]
        if not self._cache.snapshots.register(end, block_ids):
            return
        self._cache.report_snapshot(held, num_blocks)
        for name, block_id in zip(self.names(end), block_ids, strict=True):
            self._cache.queue_unstored(held, block_id, name)

    def _allocate(self) -> BlockIds:
        return tuple(self._cache.allocate(self.num_blocks))

    # --- invariants ---------------------------------------------------------------

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted if a block of a side is in the prefix cache."""
        for side in held.state.sides(held.num_computed_tokens) if held.state else ():
            if any(self._cache.pool.name_of(block_id) is not None for block_id in side):
                raise BlocksUnaccounted(f"{held.request_id}: a block of its state is cached")
