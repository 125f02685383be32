"""CPU affinity of a node's process."""

from __future__ import annotations

import os
from contextlib import suppress

from baton.core.errors import InvalidConfig


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
