"""Estimate of the time that a tier needs to load blocks. Pure."""

from __future__ import annotations

from math import ceil, exp, log

SMOOTHING = 0.3  # weight of the last load
MAX_SURPRISE = 8.0  # a load counts at most as so many times longer, or shorter, than expected
HALF_LIFE_S = 30.0  # of what was learnt, without loads
_MIN_READ_S = 1e-9


class LoadTimes:
    """Moving average of the time to read a block, which returns to the first guess.

    A wrong estimate must not last: with one that is too high nothing is loaded, so that nothing
    could correct it. The average is geometric, as loads are early or late by factors. One thread
    calls `learn`; others may read meanwhile.
    """

    def __init__(self, block_s: float, num_parallel: int = 1) -> None:
        """Begin with a guess: `block_s` for each block, with `num_parallel` read at a time."""
        self._first_s = block_s * num_parallel
        self._num_parallel = num_parallel
        self._learnt = (0.0, 0.0)  # logarithm of the average over the first guess, and when

    def load_s(self, num_blocks: int, now: float) -> float:
        """Return the time that reading so many blocks takes."""
        read_s = self._first_s * exp(self._surprise(now))
        return ceil(num_blocks / self._num_parallel) * read_s

    def learn(self, read_s: float, num_blocks: int, now: float) -> None:
        """Note that the reads of `num_blocks` blocks took `read_s` in all, without any waiting."""
        before = self._surprise(now)
        observed = log(max(_MIN_READ_S, read_s / num_blocks) / self._first_s)
        change = max(-log(MAX_SURPRISE), min(log(MAX_SURPRISE), observed - before))
        self._learnt = (before + SMOOTHING * change, now)

    def _surprise(self, now: float) -> float:
        surprise, learnt_s = self._learnt
        return surprise * float(0.5 ** (max(0.0, now - learnt_s) / HALF_LIFE_S))
