"""Disk of KV files that can be made slow for all processes, from outside of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.preloading import PreloadedLibrary, build_library

SOURCE = Path(__file__).with_name("slow_disk.c")
STATE = struct.Struct("<qq")  # delay in nanoseconds, and the number of delayed files
DELAY = struct.Struct("<q")
NS_PER_S = 1_000_000_000


class SlowDisk(PreloadedLibrary):
    """Delay of each KV file that a process writes, for all that preload the library."""

    @property
    def num_delayed(self) -> int:
        """The number of files so far."""
        _, num_delayed = STATE.unpack(self.control.read_bytes())
        return int(num_delayed)

    @contextmanager
    def slow(self, delay_s: float) -> Iterator[None]:
        self._set(delay_s)
        try:
            yield
        finally:
            self._set(0.0)

    def _set(self, delay_s: float) -> None:
        with self.control.open("r+b") as state:
            state.write(DELAY.pack(round(delay_s * NS_PER_S)))


def build(folder: Path) -> SlowDisk:
    """Build the library. Raises InvalidConfig if that fails."""
    library = build_library(SOURCE, folder, "slow-disk")
    state = folder / "disk"
    state.write_bytes(STATE.pack(0, 0))
    return SlowDisk(library, state, "CHAOS_DISK")
