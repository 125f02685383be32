"""Budget of CPU time for the grammar masks of a step. Pure.

All rows of a batch wait while one row's mask is computed. The cost of an ambiguous grammar
(`s: s s | "a"`) grows with every token, because the matcher keeps all parses of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.core.ids import RequestId

MAX_STEP_S = 0.05
# Rows below this are never refused: an unambiguous grammar takes about 20 µs, at worst 2 ms once.
EXEMPT_S = 0.002
# Weight of the newest step in a row's average, so that a single slow step does not end a row.
NEWEST_WEIGHT = 0.25
# A matcher replays the outputs of another node in one step, in chunks of this size.
REPLAY_CHUNK_TOKENS = 32
MAX_REPLAY_S, MAX_REPLAY_TOKEN_S = 0.25, 0.0005


class MaskBudget:
    """Moving average of each row's mask time, and the rows that exceed the budget of a step."""

    def __init__(self) -> None:
        self._average_s: dict[RequestId, float] = {}
        self._replay_s = 0.0  # in this step

    def begin_step(self, request_ids: Sequence[RequestId]) -> dict[RequestId, str]:
        """Return the rows that must end so that the others fit the budget, with the reasons.

        The costliest rows end first.
        """
        self._replay_s = 0.0
        costs_s = {row: self._average_s.get(row, 0.0) for row in request_ids}
        total_s = sum(costs_s.values())
        refused: dict[RequestId, str] = {}
        for request_id in sorted(costs_s, key=costs_s.__getitem__, reverse=True):
            cost_s = costs_s[request_id]
            if total_s <= MAX_STEP_S or cost_s <= EXEMPT_S:
                break
            refused[request_id] = (
                f"its token mask takes {cost_s * 1e3:.0f} ms of each step; the limit is "
                f"{MAX_STEP_S * 1e3:.0f} ms for the masks of all requests together"
            )
            total_s -= cost_s
        return refused

    def note_step(self, request_id: RequestId, cost_s: float) -> None:
        before_s = self._average_s.get(request_id, 0.0)
        self._average_s[request_id] = before_s + NEWEST_WEIGHT * (cost_s - before_s)

    def note_replay(self, cost_s: float, num_tokens: int, row_s: float) -> str | None:
        """Record a chunk of a row's replay that took `cost_s`.

        The row has now replayed `num_tokens` in `row_s`. Returns the reason if it must end.
        """
        self._replay_s += cost_s
        if self._replay_s <= MAX_REPLAY_S or row_s <= num_tokens * MAX_REPLAY_TOKEN_S:
            return None
        return f"parsing {num_tokens} tokens generated earlier took {row_s * 1e3:.0f} ms"

    def forget(self, request_id: RequestId) -> None:
        self._average_s.pop(request_id, None)
