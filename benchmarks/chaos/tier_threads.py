"""CPU time of the threads of a node's tiers, from /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

TIER_THREADS = ("kv-host", "kv-file", "kv-object")
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def tier_threads_s(pid: int) -> float:
    """Return the CPU time of the threads; 0 without the process."""
    total_s = 0.0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):  # it has ended
            if (task / "comm").read_text(encoding="utf-8").startswith(TIER_THREADS):
                total_s += cpu_s((task / "stat").read_text(encoding="utf-8"))
    return total_s


def cpu_s(stat: str) -> float:
    """Return user and system time of a line of /proc/PID/task/TID/stat."""
    fields = stat.rpartition(")")[2].split()  # those after the name, from the third on
    return (int(fields[11]) + int(fields[12])) * TICK_S
