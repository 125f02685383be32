"""Counters and status of a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.kv_transfer.tiers.eviction import EvictionOrder


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
