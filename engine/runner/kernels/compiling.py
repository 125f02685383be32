"""Runs compiler commands, as many at a time as there are cores."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress

MAX_AT_ONCE = 8  # each takes up to 0.3 GiB of memory


class CompilerFailed(Exception):
    """A compiler command failed; the message is its output."""


def run_commands(commands: Sequence[Sequence[str]], on_done: Callable[[], None]) -> None:
    """Run the commands; `on_done` is called after each. Raises CompilerFailed.

    When one fails, or Ctrl-C is pressed, the others are terminated before this returns.
    """
    compilers = _Compilers()
    num_at_once = min(MAX_AT_ONCE, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_at_once) as threads:
        jobs = [threads.submit(compilers.run, command) for command in commands]
        try:
            for job in as_completed(jobs):
                job.result()
                on_done()
        except BaseException:
            compilers.terminate()
            raise


class _Compilers:
    """Running compilers. None starts after `terminate`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_terminated = False

    def run(self, command: Sequence[str]) -> None:
        with self._lock:
            if self._is_terminated:
                return
            process = _start(command)
            self._running.add(process)
        _, errors = process.communicate()
        self._running.discard(process)
        if process.returncode:
            raise CompilerFailed(errors)

    def terminate(self) -> None:
        with self._lock:
            self._is_terminated = True
            for process in tuple(self._running):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a compiler in its own process group: it is several processes, which end together."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
