"""Warm engines of benchmarks, as processes that only wait."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.peers.completions_api import CompletionsApi, EngineFailed
from benchmarks.peers.warm_engines import keep_warm


class Waiting:
    """Engine that is a waiting process, like an idle server."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def start(self) -> Iterator[CompletionsApi]:
        with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
            self.started.append(process)
            try:
                yield CompletionsApi("http://127.0.0.1:1", groups=(process.pid,))
            finally:
                process.kill()


def awaited(pid: int, options: int) -> int:
    """Wait until the process has stopped or continued, and return its status."""
    return os.waitpid(pid, options)[1]


def test_an_engine_is_started_once_and_suspended_between_its_turns() -> None:
    waiting = Waiting()
    with ExitStack() as lifetime:
        turn = keep_warm(waiting.start, lifetime)
        with turn() as first:
            pass
        pid = waiting.started[0].pid
        assert os.WIFSTOPPED(awaited(pid, os.WUNTRACED))

        with turn() as second:
            assert os.WIFCONTINUED(awaited(pid, os.WCONTINUED))

    assert first is second
    assert [process.returncode for process in waiting.started] == [-signal.SIGKILL]


def test_an_engine_that_exited_while_suspended_is_reported() -> None:
    waiting = Waiting()
    with ExitStack() as lifetime:
        turn = keep_warm(waiting.start, lifetime)
        with turn():
            pass
        waiting.started[0].kill()
        waiting.started[0].wait()

        with pytest.raises(EngineFailed, match="has ended"), turn():
            pass
