"""Libraries that a C compiler builds for the processes under test, which preload them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from baton.core.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class PreloadedLibrary:
    """Library that injects a fault, and the path through which the fault is controlled."""

    library: Path
    control: Path
    variable: str  # names `control` to the processes


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


def preload(libraries: Collection[PreloadedLibrary]) -> dict[str, str]:
    """Return the environment in which a process loads these libraries."""
    environment = {one.variable: str(one.control) for one in libraries}
    if environment:
        environment["LD_PRELOAD"] = ":".join(str(one.library) for one in libraries)
    return environment
