"""Processes that read files for a router."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from baton.router.confined.process import PROGRAM
from tests.support.waits import until

POLL_S = 0.005


def confined_processes(parent: int) -> set[int]:
    """Return the processes that read files for a router."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            own_parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_reader = bytes(PROGRAM) in (folder / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if is_reader and own_parent == parent:
            found.add(int(folder.name))
    return found


async def confined_process_of(parent: int) -> int:
    """Wait until a router reads files, and return the process."""
    return (await until(lambda: confined_processes(parent))).pop()


async def end_of(process: int) -> None:
    """Wait until a process, which may be that of another one, has ended."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
