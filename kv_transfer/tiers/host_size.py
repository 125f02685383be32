"""Size of host tiers: a bound at the start, and growth in steps while the machine has memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.kv_transfer.tiers.block_memory import BlockMemory

MAX_CACHES = 8  # times the KV cache
SHARE = 0.5  # of the node's part of the memory that is free, without its KV cache
MIN_BYTES = 64 << 20
MIN_FREE_SHARE = 0.125  # of the memory that was free at the start: with less, nothing grows
STEP_BYTES = 64 << 20
RETRY_S = 5.0


def auto_host_bytes(spare_bytes: int, kv_bytes: int) -> int:
    """Return the bound of the host tier below a KV cache of `kv_bytes`.

    `spare_bytes` is what is left of the node's part of the memory once its KV cache is full.
    """
    return min(max(int(spare_bytes * SHARE), MIN_BYTES), MAX_CACHES * kv_bytes)


class HostGrowth:
    """Lets a host tier use its memory step by step. The kernel allocates it at the first use."""

    def __init__(
        self,
        memory: BlockMemory,
        has_room: Callable[[], bool] = lambda: True,
        step_bytes: int = STEP_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """After the first step, the tier grows only while `has_room`."""
        self.num_blocks = 0  # that may be used
        self._max_blocks = memory.num_blocks
        self._step_blocks = max(1, step_bytes // memory.block_bytes)
        self._has_room = has_room
        self._clock = clock
        self._retry_s = float("-inf")

    def grow(self) -> range:
        """Return the blocks of the next step; none at the bound, or while memory is short."""
        first = self.num_blocks
        if first == self._max_blocks or self._clock() < self._retry_s:
            return range(0)
        if first and not self._has_room():
            self._retry_s = self._clock() + RETRY_S
            return range(0)
        self.num_blocks = min(self._max_blocks, first + self._step_blocks)
        return range(first, self.num_blocks)
