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
from threading import Event, Lock

from kv_transfer.tiers.block_memory import BlockMemory, CopyBlocks

MAX_SHARE = 0.05  # of the time of one core, for each kind of work
# Sizes of a copy, at least a block: a fraction of a millisecond, and a few of them at full speed.
PACED_BYTES, FULL_SPEED_BYTES = 2 << 20, 32 << 20

Clock = Callable[[], float]


class Work(Enum):
    """Kind of work, by the age in seconds from which it is not limited. Each has its own share."""

    AWAITED = 0.5  # loads and stores: requests or blocks of the KV cache wait for them
    WRITE_BEHIND = 5.0  # from host memory to files and objects; a crash loses what is not written

    @property
    def max_paced_s(self) -> float:
        return self.value


class CopyPace:
    """Lets copies go at full speed, or in turns of which each is followed by a rest.

    Thread-safe. The engine thread reports whether requests decode. The copying thread reports
    whether stores wait for room in host memory: then nothing is limited until there is some.
    """

    def __init__(self, clock: Clock = time.monotonic, cpu_clock: Clock = time.thread_time) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock  # of the calling thread
        self._lock = Lock()
        self._full_speed = Event()
        self._full_speed.set()
        self._is_decoding = False
        self._is_short_of_room = False
        self._next_turns_s = dict.fromkeys(Work, float("-inf"))

    @property
    def is_limited(self) -> bool:
        return not self._full_speed.is_set()

    def set_decoding(self, is_decoding: bool) -> None:
        if is_decoding != self._is_decoding:
            self._is_decoding = is_decoding
            self._update()

    def set_short_of_room(self, is_short_of_room: bool) -> None:
        if is_short_of_room != self._is_short_of_room:
            self._is_short_of_room = is_short_of_room
            self._update()

    def _update(self) -> None:
        with self._lock:
            if self._is_decoding and not self._is_short_of_room:
                self._full_speed.clear()
            else:
                self._full_speed.set()

    @contextmanager
    def turn(self, work: Work, ordered_s: float) -> Iterator[None]:
        """Wait for a turn, and count the CPU time that the body takes."""
        rest_s = self.rest_s(work, ordered_s)
        if rest_s > 0:
            self._full_speed.wait(rest_s)  # returns at once at full speed
        began_s = self._cpu_clock()
        try:
            yield
        finally:
            self._note_use(work, self._cpu_clock() - began_s)

    def rest_s(self, work: Work, ordered_s: float) -> float:
        """Return the time until a limited turn may begin; not positive: now."""
        return min(self._next_turns_s[work], ordered_s + work.max_paced_s) - self._clock()

    def copy_blocks(
        self,
        copy: CopyBlocks,
        source: BlockMemory,
        blocks: Sequence[int],
        target: BlockMemory,
        into: Sequence[int],
        ordered_s: float,
    ) -> list[bytes]:
        """Copy blocks in turns. Returns their digests."""
        digests: list[bytes] = []
        while len(digests) < len(blocks):
            first = len(digests)
            end = first + self._piece_blocks(source.block_bytes)
            with self.turn(Work.AWAITED, ordered_s):
                digests += copy(source, blocks[first:end], target, into[first:end])
        return digests

    def _piece_blocks(self, block_bytes: int) -> int:
        num_bytes = PACED_BYTES if self.is_limited else FULL_SPEED_BYTES
        return max(1, num_bytes // block_bytes)

    def _note_use(self, work: Work, used_s: float) -> None:
        if self.is_limited:
            with self._lock:
                now_s = self._clock()
                next_s = max(self._next_turns_s[work], now_s) + used_s / MAX_SHARE
                self._next_turns_s[work] = min(next_s, now_s + work.max_paced_s)
