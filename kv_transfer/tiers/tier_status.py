"""State of a tier: its contents and counters, the speed of its loads, its outages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, exp, log

from baton.kv_transfer.tiers.eviction import EvictionOrder

logger = logging.getLogger(__name__)

PAUSE_S = 10.0  # without writes, or reads, after one has failed
SMOOTHING = 0.3  # weight of the last load in LoadTimes
MAX_SURPRISE = 8.0  # a load counts at most as so many times longer, or shorter, than expected
HALF_LIFE_S = 30.0  # of what was learnt, without loads
_MIN_READ_S = 1e-9


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start. Each tier's thread changes its own."""

    num_loaded: int = 0  # blocks
    num_stored: int = 0
    num_failed_loads: int = 0
    num_failed_stores: int = 0
    num_skipped_stores: int = 0  # there was no room in time, or writes paused
    observe_load: Callable[[float], None] = lambda _: None  # gets the seconds of each load

    @property
    def num_failed(self) -> int:
        return self.num_failed_loads + self.num_failed_stores + self.num_skipped_stores

    def note_load(self, seconds: float, num_blocks: int) -> None:
        if num_blocks:
            self.num_loaded += num_blocks
            self.observe_load(seconds)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """View of a tier: its blocks, and its counters so far."""

    name: str
    order: EvictionOrder
    stored_bytes: int  # of each block
    counters: TierCounters
    is_usable: bool = True  # False while it does not work and is only tried again now and then

    @property
    def num_blocks(self) -> int:
        return len(self.order)

    @property
    def num_bytes(self) -> int:
        return len(self.order) * self.stored_bytes

    @property
    def max_bytes(self) -> int:
        return self.order.max_blocks * self.stored_bytes


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


class Outage:
    """Pause after each error of the reads of a store, or of its writes.

    An outage may last for days, so each cause of it is logged once.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """`what` describes the operation, such as "stored in the file tier"."""
        self._what = what
        self._clock = clock
        self._cause = ""  # of the last error since the last success
        self._until_s = float("-inf")

    @property
    def is_over(self) -> bool:
        """True if the last operation has succeeded, or there was none."""
        return not self._cause

    @property
    def is_paused(self) -> bool:
        return self._clock() < self._until_s

    def note_error(self, error: OSError) -> None:
        self._until_s = self._clock() + PAUSE_S
        if self._cause != str(error):
            self._cause = str(error)
            logger.warning("no KV is %s until it works: %s", self._what, error)

    def note_success(self) -> None:
        if self._cause:
            self._cause = ""
            logger.info("KV is %s again", self._what)
