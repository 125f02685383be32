"""Time in which nothing but priced work and rests takes time, for tests of tiers with threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from baton.kv_transfer.tiers.copy_pace import CopyPace
from baton.kv_transfer.tiers.kv_access import BlockMemory, copy_blocks


class VirtualClock:
    """A clock that stands still until something takes time."""

    def __init__(self) -> None:
        self._now_s = 1000.0
        self._lock = Lock()

    def __call__(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds


class VirtualPace(CopyPace):
    """A pace whose rests take virtual time. All work is work of the CPU."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, clock)
        self._clock_of_rests = clock
        self.rests_s: list[float] = []  # those that were not cut short
        # Returns once what it orders can cut the rest short. Called at the beginning of each rest.
        self.in_rest: Callable[[], None] = lambda: None

    def wait(self, rest_s: float, is_over: Callable[[], bool]) -> None:
        self.in_rest()
        if not is_over():
            self.rests_s.append(rest_s)
            self._clock_of_rests.advance(rest_s)


class PricedCopies:
    """Implements CopyBlocks: a copy takes `block_s` for each block, of virtual time."""

    def __init__(self, clock: VirtualClock, block_s: float) -> None:
        self._clock = clock
        self.block_s = block_s
        self.before: Callable[[int], None] = lambda _: None  # gets the number of the copy
        self.log: list[tuple[BlockMemory, float]] = []  # targets of copies, and when they began

    def __call__(
        self,
        source: BlockMemory,
        blocks: Sequence[int],
        target: BlockMemory,
        into: Sequence[int],
    ) -> list[bytes]:
        self.log.append((target, self._clock()))
        self.before(len(self.log))
        self._clock.advance(self.block_s * len(blocks))
        return copy_blocks(source, blocks, target, into)
