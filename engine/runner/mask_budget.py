"""Processor time that the grammars of a step may take together, and which of them exceed it. Pure.

The forward pass and all neighbours of a row wait while its mask is computed. An ambiguous grammar
(`s: s s | "a"`) costs more with every token: it keeps all ways in which a text can be read.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import RequestId

MAX_STEP_S = 0.05
# Rows below this are never to blame: an unambiguous form takes some 20 µs, at worst 2 ms once.
FAIR_S = 0.002
# Weight of the newest step in a row's average, so that a single step ends nothing.
NEWEST_WEIGHT = 0.25
# Outputs that were written elsewhere are read in one step.
READ_AT_ONCE = 32
MAX_READ_S, MAX_READ_TOKEN_S = 0.25, 0.0005


class MaskBudget:
    def __init__(self, max_step_s: float = MAX_STEP_S, fair_s: float = FAIR_S) -> None:
        self._max_step_s = max_step_s
        self._fair_s = fair_s
        self._average_s: dict[RequestId, float] = {}
        self._read_s = 0.0  # of this step

    def begin_step(self, request_ids: Sequence[RequestId]) -> dict[RequestId, str]:
        """Rows that have to end so that the others fit, costliest first, and the reasons."""
        self._read_s = 0.0
        costs_s = {one: self._average_s.get(one, 0.0) for one in request_ids}
        total_s = sum(costs_s.values())
        refused: dict[RequestId, str] = {}
        for request_id in sorted(costs_s, key=costs_s.__getitem__, reverse=True):
            cost_s = costs_s[request_id]
            if total_s <= self._max_step_s or cost_s <= self._fair_s:
                break
            refused[request_id] = (
                f"its token mask takes {cost_s * 1e3:.0f} ms of each step; those of all requests "
                f"together may take {self._max_step_s * 1e3:.0f} ms"
            )
            total_s -= cost_s
        return refused

    def note_step(self, request_id: RequestId, cost_s: float) -> None:
        before_s = self._average_s.get(request_id, 0.0)
        self._average_s[request_id] = before_s + NEWEST_WEIGHT * (cost_s - before_s)

    def note_reading(self, cost_s: float, num_tokens: int, row_s: float) -> str | None:
        """A row has read on for `cost_s`, after which it has read `num_tokens` in `row_s`.

        Returns the reason if it may not go on.
        """
        self._read_s += cost_s
        if self._read_s <= MAX_READ_S or row_s <= num_tokens * MAX_READ_TOKEN_S:
            return None
        return f"reading {num_tokens} tokens that were written before took {row_s * 1e3:.0f} ms"

    def forget(self, request_id: RequestId) -> None:
        self._average_s.pop(request_id, None)
