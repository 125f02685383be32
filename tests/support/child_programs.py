"""Programs that a test starts and that end with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fork_server import SERVERS, ForkedProcess, can_fork


@contextmanager
def running_program(
    command: Sequence[str], *, is_forked: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and kill it at the end of the block if it still runs.

    `is_forked` allows a fork of a server that has imported `baton`.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if is_forked and can_fork(command):
        started: subprocess.Popen[str] = ForkedProcess(SERVERS, command, **pipes)
    else:
        started = subprocess.Popen(command, text=True, **pipes)
    with started as program:
        try:
            yield program
        finally:
            program.kill()


def cluster_processes_of(pid: int) -> list[int]:
    """Return the children of all threads of a process, without a fork server of the tests.

    Router, nodes and their own fork server have sessions of their own.
    """
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text(encoding="ascii").split()]
    return [child for child in children if os.getsid(child) == child]
