"""CPU affinity of a node's process."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from baton.core.errors import InvalidConfig

CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def pin_to_cpus(cpus: tuple[int, ...]) -> None:
    """Set the process's CPU affinity; no CPUs: leave it. Raises InvalidConfig.

    Call it before any thread starts, since threads inherit the affinity.
    """
    if not cpus:
        return
    allowed = os.sched_getaffinity(0)
    with suppress(OSError):  # raised if no CPU of them exists; single missing ones are ignored
        os.sched_setaffinity(0, cpus)
    if os.sched_getaffinity(0) != set(cpus):
        wanted, free = (",".join(map(str, sorted(some))) for some in (cpus, allowed))
        raise InvalidConfig(f"--cpus {wanted}: not all are available; choose from {free}")


def parse_cpus(written: str) -> tuple[int, ...]:
    """Parse a list of CPU cores: `0-3,6` names five."""
    cpus: list[int] = []
    for part in filter(None, written.split(",")):
        match = CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidConfig(f"--cpus {written!r}: write it like 0-3,6")
        cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cpus)
