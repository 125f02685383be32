"""Time that a pass takes by its number of rows, measured while the node decodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

# Share of a new time in the mean of its number of rows. Load on the machine makes times vary.
NEW_SHARE = 0.1
# A time that is far off counts as if it were this much above the mean: a stall is no cost of rows.
MAX_RATIO = 1.5
# Relative change of a mean that is left out of the table of all: making it takes a while.
MAX_DEVIATION = 0.02
# Passes after which a time that was not measured again is forgotten: contexts grow, load changes.
MAX_AGE_PASSES = 1024
# Cost of a row more, relative to a pass, where nothing is known. It is little, so that it is tried.
ASSUMED_SLOPE = 0.03


class PassCosts:
    """Mean times of decoding passes. Numbers of rows that were not measured are interpolated."""

    def __init__(self, max_rows: int) -> None:
        self._mean_s: list[float | None] = [None] * (max_rows + 1)  # by number of rows
        self._measured_at = [0] * (max_rows + 1)
        self._num_passes = 0
        self._table: Sequence[float] | None = None  # of all numbers; None: it must be made again

    def note_pass(self, num_rows: int, took_s: float) -> None:
        if not 1 <= num_rows < len(self._mean_s) or took_s <= 0:
            return
        mean_s = self._mean_s[num_rows]
        if mean_s is None:
            mean_s = took_s
        mean_s += NEW_SHARE * (min(took_s, MAX_RATIO * mean_s) - mean_s)
        if self._mean_s[num_rows] is None or self._is_far_off(num_rows, mean_s):
            self._table = None
        self._mean_s[num_rows] = mean_s
        self._measured_at[num_rows] = self._num_passes
        self._num_passes += 1
        if not self._num_passes % MAX_AGE_PASSES:
            self._forget_old()

    def by_num_rows(self) -> Sequence[float]:
        """Return the expected times, in seconds or, before the first pass, in any unit."""
        if self._table is None:
            self._table = self._interpolated()
        return self._table

    def _is_far_off(self, num_rows: int, mean_s: float) -> bool:
        if self._table is None:
            return True
        return abs(mean_s - self._table[num_rows]) > MAX_DEVIATION * mean_s

    def _interpolated(self) -> list[float]:
        costs = [1.0 + ASSUMED_SLOPE * num_rows for num_rows in range(len(self._mean_s))]
        known = [(rows, mean_s) for rows, mean_s in enumerate(self._mean_s) if mean_s is not None]
        if not known:
            return costs
        (lowest, low_s), (highest, high_s) = known[0], known[-1]
        below, above = low_s / costs[lowest], high_s / costs[highest]
        for num_rows in range(lowest):
            costs[num_rows] *= below
        for num_rows in range(highest + 1, len(costs)):
            costs[num_rows] *= above
        for (fewer, fewer_s), (more, more_s) in pairwise(known):
            for num_rows in range(fewer, more):
                share = (num_rows - fewer) / (more - fewer)
                costs[num_rows] = fewer_s + share * (more_s - fewer_s)
        costs[highest] = high_s
        return costs

    def _forget_old(self) -> None:
        for num_rows, measured_at in enumerate(self._measured_at):
            if measured_at < self._num_passes - MAX_AGE_PASSES:
                self._mean_s[num_rows] = None
        self._table = None
