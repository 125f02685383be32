"""Calendar of snapshots of recurrent states: after which tokens the coming pass takes some.

Decoding requests cost no work per step here: a calendar lists the pass in which each reaches its
next position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.engine.kv_cache.held_kv import HeldKv, RecurrentState
from baton.engine.step_calendar import StepCalendar


class _Decoding(NamedTuple):
    held: HeldKv
    state: RecurrentState  # the request has another one, or none, once it was preempted or ended
    max_num_slots: int  # the request ends at this number of tokens


class SnapshotCalendar:
    def __init__(self, interval: int, block_size: int) -> None:
        self._interval = interval
        self._block_size = block_size
        self._calendar: StepCalendar[_Decoding] = StepCalendar()

    def start_decode(self, held: HeldKv, max_num_slots: int) -> None:
        """Track a request whose next token is computed by the next pass to be planned."""
        if held.state is not None:
            decoding = _Decoding(held, held.state, max_num_slots)
            self._set_due(decoding, held.num_computed_tokens)

    def begin_pass(
        self, chunks: Iterable[tuple[HeldKv, int]]
    ) -> Iterator[tuple[HeldKv, list[int]]]:
        """Yield the positions of snapshots by request, the most useful ones first."""
        for held, num_tokens in chunks:
            yield held, self._positions(held, num_tokens)
        for decoding in self._calendar.begin_step():
            if decoding.held.state is decoding.state:
                position = decoding.held.num_computed_tokens + 1
                yield decoding.held, [position]
                self._set_due(decoding, position)

    def _positions(self, held: HeldKv, num_tokens: int) -> list[int]:
        """Return the positions in a prefill chunk.

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

    def _set_due(self, decoding: _Decoding, num_computed: int) -> None:
        """Record the pass that computes the token before the next position."""
        num_ahead = self._interval - num_computed % self._interval
        if num_computed + num_ahead <= decoding.max_num_slots:
            self._calendar.add(self._calendar.step + num_ahead, decoding)
