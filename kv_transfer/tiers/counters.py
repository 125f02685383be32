"""Counters and status of a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _observe_nothing(_: float) -> None:
    pass


@dataclass(slots=True)
class TierCounters:
    """Counters of one tier since the start. Each tier's thread changes its own."""

    num_loaded: int = 0  # blocks
    num_stored: int = 0
    num_failed_loads: int = 0
    num_failed_stores: int = 0
    num_skipped_stores: int = 0  # there was no room in time, or writes paused
    observe_load: Callable[[float], None] = _observe_nothing  # gets the seconds of each load

    @property
    def num_failed(self) -> int:
        return self.num_failed_loads + self.num_failed_stores + self.num_skipped_stores

    def note_load(self, seconds: float, num_blocks: int) -> None:
        if num_blocks:
            self.num_loaded += num_blocks
            self.observe_load(seconds)


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Contents of a tier, and its counters so far."""

    name: str
    num_blocks: int
    num_bytes: int
    max_bytes: int
    num_evicted: int  # blocks
    num_retained: int  # blocks
    num_refused: int  # blocks that were not retained, because too many are
    counters: TierCounters
    is_usable: bool = True  # False while it does not work and is only tried again now and then
