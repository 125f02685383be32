"""Memory of the recurrent layers: the same number of blocks per request, however long it is."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.core.ids import BlockId
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.engine.kv_cache.block_names import snapshot_end
from baton.engine.kv_cache.cache_group import (
    CacheGroup,
    NamedBlock,
    PassChunk,
    PrefixHit,
    PrefixQuery,
)
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.kv_cache.held_kv import HeldKv, RecurrentState
from baton.engine.kv_cache.prefix_cache import PrefixCache
from baton.engine.plan import NO_STATE_COPIES, BlockIds, StateCopies, StateSnapshot
from baton.engine.step_calendar import StepCalendar


class _PendingCopies(NamedTuple):
    """Snapshots that a pass takes of a request's state."""

    held: HeldKv
    state: RecurrentState
    snapshots: tuple[StateSnapshot, ...]


class StateGroup(CacheGroup):
    """The recurrent layers of a model.

    A running request has two sides of the same number of blocks: a pass reads one and writes the
    other. With drafts, it has one more for each, and a pass writes one for each of its tokens.

    A state cannot be cut at an earlier token. So snapshots of it at the ends of some blocks are in
    the prefix cache, and a prefix hit of these models ends at one.

    With states of 2 blocks, a request may hold the sides (4, 5) and (6, 7). A snapshot of it after
    32 tokens in blocks 8 and 9 is named by the hash of the block that ends with the 32nd token. A
    later request with these tokens holds 8 and 9 until its first pass has read them.

    A snapshot is optional: it is taken from free blocks, held until the pass has ended, and cached
    and evictable once the pass has been applied.
    """

    label = "state"
    is_all_or_nothing = True
    forgets = True

    def __init__(self, layout: CacheLayout, cache: PrefixCache) -> None:
        self.number = len(layout.groups)
        self._num_blocks = layout.num_state_blocks  # of one state
        self._num_sides = layout.num_state_sides
        self._has_drafts = layout.num_drafted > 0
        self._cache = cache
        self._block_size = cache.block_size
        # At this distance, snapshots take as much memory as the blocks of one KV group.
        self._calendar = SnapshotCalendar(self._num_blocks * cache.block_size, cache.block_size)
        self._pending: deque[list[_PendingCopies]] = deque()  # by pass, in the order of the plans

    # --- prefix hits --------------------------------------------------------------

    def names(self, block_hash: BlockHash) -> list[BlockHash]:
        return self._cache.ends.parts(block_hash)

    def longest_prefix(self, query: PrefixQuery, num_blocks: int) -> int:
        if query.continues_at is not None:
            return num_blocks  # the state comes from the node that computes the tokens in between
        is_cached = query.cached.is_cached
        while num_blocks and not all(map(is_cached, self.names(query.hashes[num_blocks - 1]))):
            num_blocks -= 1
        return num_blocks

    def find(self, query: PrefixQuery, num_blocks: int) -> list[BlockId]:
        if not num_blocks or query.continues_at is not None:
            return []
        return query.cached.find(self.names(query.hashes[num_blocks - 1]))

    def named_blocks(
        self, hashes: Sequence[BlockHash], block_ids: Sequence[BlockId]
    ) -> Iterable[NamedBlock]:
        if block_ids:
            for name, block_id in zip(self.names(hashes[-1]), block_ids, strict=True):
                yield NamedBlock(len(hashes) - 1, name, block_id)

    # --- blocks of a request ------------------------------------------------------

    def num_allocated(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> int:
        return self._num_sides * self._num_blocks

    def allocate(self, held: HeldKv, hit: PrefixHit, num_blocks: int) -> None:
        held.state = RecurrentState(
            tuple(self._allocate() for _ in range(self._num_sides)),
            held.num_computed_tokens,
            tuple(hit.blocks[self.number]),
            hit.num_shared_blocks * self._block_size,
        )

    def cached_blocks(self, held: HeldKv) -> Iterator[tuple[int, BlockId]]:
        num_full = held.num_computed_tokens // self._block_size
        for place, end in enumerate(held.block_hashes[:num_full]):
            if end in self._cache.ends:
                for block_id in self._cache.pool.find(self.names(end)):
                    yield place, block_id

    def release(self, held: HeldKv) -> list[tuple[int, BlockId]]:
        if held.state is None:
            return []
        self._cache.pool.release(held.state.block_ids)
        held.state = None
        # Released with the blocks at whose ends they are, snapshots are evicted in turn with them.
        snapshots = list(self.cached_blocks(held))
        self._cache.pool.hold(block_id for _, block_id in snapshots)
        return snapshots

    def num_held(self, held: HeldKv) -> int:
        return 0 if held.state is None else len(held.state.block_ids)

    # --- the prefix cache ---------------------------------------------------------

    def register_loaded(self, held: HeldKv | None, blocks: Sequence[NamedBlock]) -> None:
        names, block_ids = [each.name for each in blocks], [each.block_id for each in blocks]
        end = snapshot_end(names[0])
        if end is None or names != self.names(end):
            return  # a part is missing
        if held is not None:
            self._register_snapshot(held, blocks[0].place + 1, block_ids)
        else:
            self._cache.add_end(end, names, block_ids)

    def _register_snapshot(
        self, held: HeldKv, num_blocks: int, block_ids: Sequence[BlockId]
    ) -> None:
        end = held.block_hashes[num_blocks - 1]
        names = self.names(end)
        if not self._cache.add_end(end, names, block_ids):
            return
        self._cache.report_stored(held, num_blocks - 1, num_blocks)
        for name, block_id in zip(names, block_ids, strict=True):
            self._cache.queue_unstored(held, block_id, name)

    # --- a pass -------------------------------------------------------------------

    def start_decode(self, held: HeldKv, position: int, max_num_slots: int) -> None:
        """Note that the next pass to be planned computes the token at this position."""
        # With drafts, it is not known in advance which pass reaches a position.
        if not self._has_drafts:
            self._calendar.start_decode(held, position, max_num_slots)

    def plan_pass(self, chunks: Iterable[PassChunk] | None) -> StateCopies:
        """Return the snapshots that the pass takes, given its prefill chunks; None: no pass."""
        pending: list[_PendingCopies] = []
        due = () if chunks is None else self._calendar.begin_pass(chunks)
        for held, positions in due:
            found = [self._allocate_snapshot(held, position) for position in positions]
            taken = sorted(snapshot for snapshot in found if snapshot is not None)
            if taken and held.state is not None:
                pending.append(_PendingCopies(held, held.state, tuple(taken)))
        self._pending.append(pending)
        if not pending:  # most steps
            return NO_STATE_COPIES
        return {each.held.request_id: each.snapshots for each in pending}

    def end_chunk(self, held: HeldKv) -> None:
        if held.state is not None:
            read = held.state.end_chunk(held.num_computed_tokens)
            if read:
                self._cache.pool.release(read)

    def end_pass(self) -> None:
        """Cache what the first of the planned passes has copied."""
        for held, state, snapshots in self._pending.popleft():
            for num_tokens, block_ids in snapshots:
                # Those of requests that were preempted or have ended are dropped.
                if held.state is state and held.is_registering:
                    held.extend_hashes(self._block_size)
                    self._register_snapshot(held, num_tokens // self._block_size, block_ids)
                self._cache.pool.release(block_ids)

    def blocks_of_passes(self) -> Iterator[BlockId]:
        """Yield the blocks that are held for the planned passes."""
        for each in itertools.chain.from_iterable(self._pending):
            for snapshot in each.snapshots:
                yield from snapshot.block_ids

    def _allocate_snapshot(self, held: HeldKv, num_tokens: int) -> StateSnapshot | None:
        """Allocate the blocks of a snapshot after these tokens of the request.

        Returns None if it would not be cached, is cached already, or there are too few blocks.
        """
        if not held.is_registering or self._cache.pool.num_free < self._num_blocks:
            return None
        held.extend_hashes(self._block_size)
        place = num_tokens // self._block_size - 1
        # Its last token may be that of a pass which has not ended. Then it has no name yet.
        is_named = place < len(held.block_hashes)
        if is_named and held.block_hashes[place] in self._cache.ends:
            return None
        return StateSnapshot(num_tokens, self._allocate())

    def _allocate(self) -> BlockIds:
        return tuple(self._cache.allocate(self._num_blocks))

    # --- invariants ---------------------------------------------------------------

    def check(self, held: HeldKv) -> None:
        """Raise BlocksUnaccounted if a block of a side is in the prefix cache."""
        for side in held.state.sides(held.num_computed_tokens) if held.state else ():
            if any(self._cache.pool.name_of(block_id) is not None for block_id in side):
                raise BlocksUnaccounted(f"{held.request_id}: a block of its state is cached")


def state_groups(layout: CacheLayout, cache: PrefixCache) -> tuple[StateGroup, ...]:
    return (StateGroup(layout, cache),) if layout.has_state else ()


class _Decoding(NamedTuple):
    held: HeldKv
    state: RecurrentState  # the request has another one, or none, once it was preempted or ended
    max_num_slots: int  # the request ends at this number of tokens
    position: int  # of its next snapshot


class SnapshotCalendar:
    """Calendar of snapshots of recurrent states: after which tokens the coming pass takes some.

    Decoding requests cost no work per step here: a calendar lists the pass in which each reaches
    its next position.
    """

    def __init__(self, interval: int, block_size: int) -> None:
        self._interval = interval
        self._block_size = block_size
        self._calendar: StepCalendar[_Decoding] = StepCalendar()

    def start_decode(self, held: HeldKv, position: int, max_num_slots: int) -> None:
        """Track a request. The next pass to be planned computes its token at this position."""
        if held.state is not None:
            self._set_due(_Decoding(held, held.state, max_num_slots, position))

    def begin_pass(self, chunks: Iterable[PassChunk]) -> Iterator[tuple[HeldKv, list[int]]]:
        """Yield the positions of snapshots by request, the most useful ones first."""
        for chunk in chunks:
            yield chunk.held, self._positions(chunk)
        for decoding in self._calendar.begin_step():
            if decoding.held.state is decoding.state:
                yield decoding.held, [decoding.position]
                self._set_due(decoding)

    def _positions(self, chunk: PassChunk) -> list[int]:
        """Return the positions in a prefill chunk.

        The prompt leaves an earlier one where the KV that both share ends: a third prompt may do
        the same. The same prompt can hit the last whole block before its last token.
        """
        held, start, end = chunk.held, chunk.start, chunk.end
        shared = held.state.num_shared_tokens if held.state is not None else 0
        last = (held.num_tokens - 1) // self._block_size * self._block_size
        first = start - start % self._interval + self._interval
        positions = dict.fromkeys([shared, last, *range(first, end + 1, self._interval)])
        return [position for position in positions if start < position <= end]

    def _set_due(self, decoding: _Decoding) -> None:
        """Record the pass that computes the token before the position after `decoding`'s."""
        num_ahead = self._interval - decoding.position % self._interval
        position = decoding.position + num_ahead
        if position <= decoding.max_num_slots:
            self._calendar.add(
                self._calendar.step + num_ahead, decoding._replace(position=position)
            )
