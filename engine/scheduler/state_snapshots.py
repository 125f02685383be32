"""Snapshots of recurrent states: which ones the coming pass takes, and what becomes of them.

A snapshot is optional: it is taken from free blocks, held while the pass runs, and cached and
evictable once the pass has been applied. Decoding requests cost no work per step here: a calendar
lists the pass in which each reaches its next position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.core.ids import BlockId, RequestId
from baton.engine.kv_cache.manager import KvCache
from baton.engine.kv_cache.recurrent_state import RecurrentState
from baton.engine.plan import StateSnapshot
from baton.engine.scheduler.request import Request


class _TrackedState(NamedTuple):
    """State of a request; the request has another one, or none, once it was preempted or ended."""

    request: Request
    state: RecurrentState

    @property
    def is_alive(self) -> bool:
        return self.request.kv.state is self.state


class StateSnapshots:
    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        # At this distance, snapshots take as much memory as the blocks of one KV group.
        self._interval = cache.num_state_blocks * cache.block_size
        self._next_pass = 1
        self._due: dict[int, list[_TrackedState]] = {}
        self._pending: list[tuple[_TrackedState, tuple[StateSnapshot, ...]]] = []

    def start_decode(self, request: Request) -> None:
        """Track a request whose next token is computed by the next pass to be planned."""
        if request.kv.state is not None:
            tracked = _TrackedState(request, request.kv.state)
            self._set_due(tracked, request.kv.num_computed_tokens, self._next_pass)

    def plan(
        self, chunks: Sequence[tuple[Request, int]]
    ) -> dict[RequestId, tuple[StateSnapshot, ...]] | None:
        """Allocate snapshots for the coming pass, from the blocks that nothing else needs."""
        if not self._interval:
            return None
        for request, num_tokens in chunks:
            self._take(request, self._positions(request, num_tokens))
        for tracked in self._due.pop(self._next_pass, ()):
            if tracked.is_alive:
                position = tracked.request.kv.num_computed_tokens + 1
                self._take(tracked.request, [position])
                self._set_due(tracked, position, self._next_pass + 1)
        self._next_pass += 1
        return {tracked.request.request_id: taken for tracked, taken in self._pending}

    def apply(self) -> None:
        """Cache and release the snapshots of the pass. Those of ended requests are dropped."""
        for tracked, snapshots in self._pending:
            for snapshot in snapshots:
                if tracked.is_alive:
                    self._cache.register_snapshot(tracked.request.kv, snapshot)
                self._cache.pool.release(snapshot.block_ids)
        self._pending.clear()

    def held_blocks(self) -> Iterator[BlockId]:
        for _, snapshots in self._pending:
            for snapshot in snapshots:
                yield from snapshot.block_ids

    def _positions(self, request: Request, num_tokens: int) -> list[int]:
        """Return the positions in a prefill chunk, the most useful ones first.

        The prompt leaves an earlier one where the KV that both share ends: a third prompt may do
        the same. The same prompt can hit the last whole block before its last token.
        """
        start = request.kv.num_computed_tokens
        end = start + num_tokens
        shared = request.kv.state.num_shared_tokens if request.kv.state is not None else 0
        last = self._cache.num_whole_tokens(request.num_tokens - 1)
        first = start - start % self._interval + self._interval
        positions = dict.fromkeys([shared, last, *range(first, end + 1, self._interval)])
        return [position for position in positions if start < position <= end]

    def _take(self, request: Request, positions: Sequence[int]) -> None:
        found = [self._cache.allocate_snapshot(request.kv, position) for position in positions]
        taken = sorted(snapshot for snapshot in found if snapshot is not None)
        if taken and request.kv.state is not None:
            self._pending.append((_TrackedState(request, request.kv.state), tuple(taken)))

    def _set_due(self, tracked: _TrackedState, num_computed: int, next_pass: int) -> None:
        """Record the pass that computes the token before the next position."""
        num_ahead = self._interval - num_computed % self._interval
        if num_computed + num_ahead <= tracked.request.max_num_slots:
            self._due.setdefault(next_pass + num_ahead - 1, []).append(tracked)
