"""Wall clocks of processes that can be set forward and back individually."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from errors import InvalidConfig

SOURCE = Path(__file__).with_name("clock.c")
FOLDER_VARIABLE = "CHAOS_CLOCKS"
NS_PER_S = 1_000_000_000


def can_jump() -> bool:
    """Return whether there is a C compiler to build the library with."""
    return shutil.which("cc") is not None


@dataclass(frozen=True, slots=True)
class Clocks:
    """Clocks of all processes started with this environment, by pid."""

    folder: Path
    library: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), FOLDER_VARIABLE: str(self.folder)}

    def shift(self, pid: int, by_s: float) -> None:
        """Shift the clock of a process. Raises OSError if it has none."""
        with (self.folder / str(pid)).open("r+b") as clock:
            clock.write(round(by_s * NS_PER_S).to_bytes(8, "little", signed=True))


def build(folder: Path) -> Clocks:
    """Build the library. Raises InvalidConfig if that fails."""
    library = folder / "clock.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise InvalidConfig(f"jump faults need a C compiler: {reason}; leave out jump") from None
    clocks = folder / "clocks"
    os.mkdir(clocks)
    return Clocks(clocks, library)
