"""Libraries that a C compiler builds for the processes under test, which preload them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from baton.core.errors import InvalidConfig


def has_compiler() -> bool:
    return shutil.which("cc") is not None


def build_library(source: Path, folder: Path, fault: str) -> Path:
    """Build the library of a kind of fault. Raises InvalidConfig if that fails."""
    library = folder / f"{source.stem}.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        message = f"{fault} faults need a C compiler: {reason}; leave out {fault}"
        raise InvalidConfig(message) from None
    return library


def preload(*libraries: Path) -> dict[str, str]:
    """Return the environment in which a process loads these libraries."""
    return {"LD_PRELOAD": ":".join(map(str, libraries))} if libraries else {}
