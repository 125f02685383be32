"""Processes started by a measurement, and their CPU time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from baton.cluster import ClusterFailed
from baton.rpc.server import parse_announcement

CPUCLOCK_SCHED = 2
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    address: str
    pid: int

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, including threads that have ended."""
    return time.clock_gettime((~pid << 3) | CPUCLOCK_SCHED)


def cpu_s_of_tree(pid: int) -> float:
    """Return the CPU time of a process and its descendants, also of those that have ended."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    own_s = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for each in lists for child in each.read_text(encoding="ascii").split()]
    return own_s + sum(map(cpu_s_of_tree, children))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def server(module: str, *arguments: str) -> Iterator[ServerProcess]:
    """Run a module as a server process within the block; it announces its address."""
    command = [sys.executable, "-m", module, *arguments, "--parent-pid", str(os.getpid())]
    # A session of its own: Ctrl-C goes to this process only, which ends the server in order.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield ServerProcess(_announced(process, command), process.pid)
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
def external_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[str],
    stderr: int,
) -> Iterator[subprocess.Popen[str]]:
    """Run an external program within the block, and kill it with its children at the end.

    Signals are deferred during the start: an exception then would leave the process running.
    """
    with ExitStack() as ends:
        with defer_signals():
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
    # The child processes of an engine survive a signal to the engine alone.
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)
