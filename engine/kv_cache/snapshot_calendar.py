"""Calendar of snapshots of recurrent states: after which tokens the coming pass takes some.

Decoding requests cost no work per step here: a calendar lists the pass in which each reaches its
next position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.engine.kv_cache.cache_group import PassChunk
from baton.engine.kv_cache.held_kv import HeldKv, RecurrentState
from baton.engine.step_calendar import StepCalendar


class _Decoding(NamedTuple):
    held: HeldKv
    state: RecurrentState  # the request has another one, or none, once it was preempted or ended
    max_num_slots: int  # the request ends at this number of tokens
    position: int  # of its next snapshot


class SnapshotCalendar:
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
