"""Pace of copies and file operations while requests decode.

A decode step waits for its slowest core, so a burst of copies delays steps by the CPU time that it
takes from one core. While requests decode, the threads of all tiers of a node together take a small
share of one core, in small pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from threading import Condition

MAX_SHARE = 0.05  # of the time of one core, for each kind of work
# Sizes of a copy, at least a block: a fraction of a millisecond, and a few of them at full speed.
PACED_BYTES, FULL_SPEED_BYTES = 2 << 20, 8 << 20

Clock = Callable[[], float]
# Copies blocks into others, and returns their digests. Other Python threads run meanwhile.
CopyPiece = Callable[[Sequence[int], Sequence[int]], list[bytes]]


class PacedWork(Enum):
    """Kind of work, by the age in seconds from which it is not limited. Each has its own share."""

    LOAD = 0.25  # a request waits for it
    STORE = 0.5  # blocks of the KV cache wait for it
    WRITE_BEHIND = 5.0  # from host memory to files and objects; a crash loses what is not written
    TOUCH = 60.0  # mapping of host memory; nothing waits for it

    @property
    def max_paced_s(self) -> float:
        return self.value


def _never() -> bool:
    return False


class CopyPace:
    """Lets copies go at full speed, or in turns of which each is followed by a rest.

    Thread-safe. The engine thread reports whether requests decode. The copying thread reports
    whether stores wait for room in host memory: then nothing is limited until there is some.
    """

    def __init__(self, clock: Clock = time.monotonic, cpu_clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock  # of the calling thread
        self._changed = Condition()
        self._is_decoding = False
        self._is_short_of_room = False
        self._next_turns_s = dict.fromkeys(PacedWork, float("-inf"))

    @property
    def is_limited(self) -> bool:
        return self._is_decoding and not self._is_short_of_room

    def set_decoding(self, is_decoding: bool) -> None:
        if is_decoding != self._is_decoding:
            self._is_decoding = is_decoding
            self.recheck_rests()

    def set_short_of_room(self, is_short_of_room: bool) -> None:
        if is_short_of_room != self._is_short_of_room:
            self._is_short_of_room = is_short_of_room
            self.recheck_rests()

    def recheck_rests(self) -> None:
        """Let the turns that rest look whether they still have to."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def turn(
        self, work: PacedWork, ordered_s: float, is_urgent: Callable[[], bool] = _never
    ) -> Iterator[None]:
        """Wait for a turn, and count the CPU time that the body takes.

        The wait ends early once `is_urgent` returns True. Call `recheck_rests` when that changes.
        """
        rest_s = self.rest_s(work, ordered_s)
        if rest_s > 0:
            self.wait(rest_s, lambda: not self.is_limited or is_urgent())
        began_s = self._cpu_clock()
        try:
            yield
        finally:
            self._note_use(work, self._cpu_clock() - began_s)

    def wait(self, rest_s: float, is_over: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(is_over, rest_s)

    def rest_s(self, work: PacedWork, ordered_s: float) -> float:
        """Return the time until a limited turn may begin; not positive: now."""
        if not self.is_limited:
            return 0.0
        return min(self._next_turns_s[work], ordered_s + work.max_paced_s) - self._clock()

    def copy_blocks(
        self,
        copy: CopyPiece,
        block_bytes: int,
        blocks: Sequence[int],
        into: Sequence[int],
        work: PacedWork,
        ordered_s: float,
        is_urgent: Callable[[], bool] = _never,
    ) -> tuple[list[bytes], float]:
        """Copy blocks in turns. Returns their digests, and the seconds without rests."""
        digests: list[bytes] = []
        copy_s = 0.0
        while len(digests) < len(blocks):
            first = len(digests)
            end = first + self.piece_blocks(block_bytes)
            with self.turn(work, ordered_s, is_urgent):
                began_s = self._clock()
                digests += copy(blocks[first:end], into[first:end])
                copy_s += self._clock() - began_s
        return digests, copy_s

    def piece_blocks(self, block_bytes: int) -> int:
        num_bytes = PACED_BYTES if self.is_limited else FULL_SPEED_BYTES
        return max(1, num_bytes // block_bytes)

    def _note_use(self, work: PacedWork, used_s: float) -> None:
        if self.is_limited:
            with self._changed:
                now_s = self._clock()
                next_s = max(self._next_turns_s[work], now_s) + used_s / MAX_SHARE
                self._next_turns_s[work] = min(next_s, now_s + work.max_paced_s)
