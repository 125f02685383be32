"""Snapshots of recurrent states: which ones the coming pass takes, and what becomes of them.

A snapshot is optional: it is taken from free blocks, held while the pass runs, and cached and
evictable once the pass has been applied. Decoding requests cost no work per step here: a calendar
lists the pass in which each reaches its next position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from baton.core.ids import BlockId, RequestId
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.held_kv import HeldKv
from baton.engine.kv_cache.recurrent_state import RecurrentState
from baton.engine.kv_cache.state_group import StateGroup
from baton.engine.plan import StateSnapshot
from baton.engine.step_calendar import StepCalendar


class _Tracked(NamedTuple):
    """State of a request, which has another one, or none, once it was preempted or ended."""

    held: HeldKv
    state: RecurrentState
    max_num_slots: int = 0  # the request ends at this number of tokens

    @property
    def is_alive(self) -> bool:
        return self.held.state is self.state


class SnapshotCalendar:
    def __init__(self, states: StateGroup, pool: BlockPool, block_size: int) -> None:
        self._states = states
        self._pool = pool
        self._block_size = block_size
        # At this distance, snapshots take as much memory as the blocks of one KV group.
        self._interval = states.num_blocks * block_size
        self._calendar: StepCalendar[_Tracked] = StepCalendar()
        self._pending: list[tuple[_Tracked, tuple[StateSnapshot, ...]]] = []

    def start_decode(self, held: HeldKv, max_num_slots: int) -> None:
        """Track a request whose next token is computed by the next pass to be planned."""
        if held.state is not None:
            tracked = _Tracked(held, held.state, max_num_slots)
            self._set_due(tracked, held.num_computed_tokens)

    def plan(
        self, chunks: Iterable[tuple[HeldKv, int]]
    ) -> dict[RequestId, tuple[StateSnapshot, ...]]:
        """Allocate snapshots for the coming pass, from the blocks that nothing else needs."""
        for held, num_tokens in chunks:
            self._take(held, self._positions(held, num_tokens))
        for tracked in self._calendar.begin_step():
            if tracked.is_alive:
                position = tracked.held.num_computed_tokens + 1
                self._take(tracked.held, [position])
                self._set_due(tracked, position)
        if not self._pending:  # most steps
            return {}
        return {tracked.held.request_id: taken for tracked, taken in self._pending}

    def apply(self) -> None:
        """Cache and release the snapshots of the pass. Those of ended requests are dropped."""
        for tracked, snapshots in self._pending:
            for snapshot in snapshots:
                if tracked.is_alive:
                    self._states.register_snapshot(tracked.held, snapshot)
                self._pool.release(snapshot.block_ids)
        self._pending.clear()

    def held_blocks(self) -> Iterator[BlockId]:
        for _, snapshots in self._pending:
            for snapshot in snapshots:
                yield from snapshot.block_ids

    def _positions(self, held: HeldKv, num_tokens: int) -> list[int]:
        """Return the positions in a prefill chunk, the most useful ones first.

        The prompt leaves an earlier one where the KV that both share ends: a third prompt may do
        the same. The same prompt can hit the last whole block before its last token.
        """
        start = held.num_computed_tokens
        end = start + num_tokens
        shared = held.state.num_shared_tokens if held.state is not None else 0
        last = (held.num_tokens - 1) // self._block_size * self._block_size
        first = start - start % self._interval + self._interval
        positions = dict.fromkeys([shared, last, *range(first, end + 1, self._interval)])
        return [position for position in positions if start < position <= end]

    def _take(self, held: HeldKv, positions: Sequence[int]) -> None:
        found = [self._states.allocate_snapshot(held, position) for position in positions]
        taken = sorted(snapshot for snapshot in found if snapshot is not None)
        if taken and held.state is not None:
            self._pending.append((_Tracked(held, held.state), tuple(taken)))

    def _set_due(self, tracked: _Tracked, num_computed: int) -> None:
        """Record the pass that computes the token before the next position."""
        num_ahead = self._interval - num_computed % self._interval
        if num_computed + num_ahead <= tracked.max_num_slots:
            self._calendar.add(self._calendar.step + num_ahead, tracked)
