"""Processes that a measurement starts, and what they cost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from baton.cluster import ClusterFailed
from baton.interrupts import ends_wait
from serving.server import parse_announcement

CPUCLOCK_SCHED = 2
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Server:
    address: str
    pid: int

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far, those that ended included."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


@contextmanager
def server(module: str, *arguments: str) -> Iterator[Server]:
    """A process that announces where it serves, from here to the end of the block."""
    command = [sys.executable, "-m", module, *arguments, "--parent-pid", str(os.getpid())]
    # Its own session: Ctrl-C is for this process, which ends the others in order.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield Server(_announced(process, command), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _announced(process: subprocess.Popen[str], command: Sequence[str]) -> str:
    for line in process.stdout or ():
        announced = parse_announcement(line)
        if announced is not None:
            return announced[1]
    raise ClusterFailed(f"{' '.join(command)} ended with code {process.wait()} at start")


@contextmanager
def others(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[str],
    stderr: int,
) -> Iterator[subprocess.Popen[str]]:
    """A program that knows nothing of us, ended with all that it started at the end of the block.

    A signal that came while it starts would leave it without anybody who ends it.
    """
    with ExitStack() as ends:
        with ends_wait():
            process = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,
            )
            ends.enter_context(process)
            ends.callback(_end_all, process.pid)
        yield process


def _end_all(group: int) -> None:
    # An engine's own processes outlive it when it is told alone.
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
