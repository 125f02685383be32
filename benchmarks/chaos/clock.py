"""Wall clocks of processes that can be set forward and back individually."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.preloading import build_library

SOURCE = Path(__file__).with_name("clock.c")
FOLDER_VARIABLE = "CHAOS_CLOCKS"
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of all processes started with this environment, by pid."""

    folder: Path
    library: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of a process that preloads the library."""
        return {FOLDER_VARIABLE: str(self.folder)}

    def shift(self, pid: int, by_s: float) -> None:
        """Shift the clock of a process. Raises OSError if it has none."""
        with (self.folder / str(pid)).open("r+b") as clock:
            clock.write(round(by_s * NS_PER_S).to_bytes(8, "little", signed=True))


def build(folder: Path) -> Clocks:
    """Build the library. Raises InvalidConfig if that fails."""
    library = build_library(SOURCE, folder, "jump")
    clocks = folder / "clocks"
    os.mkdir(clocks)
    return Clocks(clocks, library)
