"""Wall clocks of processes that can be set forward and back individually."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.chaos.preloading import PreloadedLibrary, build_library

SOURCE = Path(__file__).with_name("clock.c")
NS_PER_S = 1_000_000_000


class Clocks(PreloadedLibrary):
    """Clocks of all processes that preload the library, by pid."""

    def shift(self, pid: int, by_s: float) -> None:
        """Shift the clock of a process. Raises OSError if it has none."""
        with (self.control / str(pid)).open("r+b") as clock:
            clock.write(round(by_s * NS_PER_S).to_bytes(8, "little", signed=True))


def build(folder: Path) -> Clocks:
    """Build the library. Raises InvalidConfig if that fails."""
    library = build_library(SOURCE, folder, "jump")
    clocks = folder / "clocks"
    os.mkdir(clocks)
    return Clocks(library, clocks, "CHAOS_CLOCKS")
