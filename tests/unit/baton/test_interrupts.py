"""Signals at critical moments: while a program or a call starts."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, ClassVar

import pytest

from baton.cli.event_loop import run_interruptibly
from baton.client.client import stream_interruptibly
from benchmarks.processes import defer_signals, external_process
from tests.support.waits import await_value

TIMEOUT_S = 60.0
MAIN_THREAD_CALL = Path("/proc/self/syscall")  # number and arguments
# Presses Ctrl-C in the middle of the imports of `baton nodes`.
WHILE_IT_IMPORTS = """
import signal, sys
from importlib.abc import MetaPathFinder
class Presses(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "baton.cli.commands.nodes":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Presses())
sys.argv = ["baton", "nodes", "--once"]
from baton.__main__ import main
main()
"""


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


@pytest.fixture
def sigterm_exits() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, _exit)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm_exits")
def test_a_deferred_signal_terminates_the_process_after_the_block() -> None:
    came_to = []

    def hear() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            came_to.append("the end of the block")

    with pytest.raises(SystemExit) as ended:
        hear()

    assert came_to
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is _exit


class RecordedPopen(subprocess.Popen[str]):
    """Popen that gets SIGTERM when its process exists but has not been returned yet."""

    pids: ClassVar[list[int]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pids.append(os.pidfd_open(self.pid))
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.usefixtures("sigterm_exits")
def test_a_child_process_is_terminated_if_its_parent_exits_during_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", RecordedPopen)
    monkeypatch.setattr(RecordedPopen, "pids", [])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    with pytest.raises(SystemExit), external_process(["sleep", "1000"], os.environ, **quiet):
        pass

    [process] = RecordedPopen.pids
    assert select.select([process], [], [], TIMEOUT_S)[0], "it goes on"
    os.close(process)


class Slow:
    """Call whose start the test releases, and which then streams until it is cancelled."""

    def __init__(self) -> None:
        self.may_start: SimpleQueue[None] = SimpleQueue()
        self.is_cancelled = threading.Event()

    def start(self) -> Slow:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        self.may_start.get()
        return self

    def __iter__(self) -> Iterator[int]:
        self.is_cancelled.wait()
        return iter(())

    def cancel(self) -> None:
        self.is_cancelled.set()


def test_a_call_that_is_closed_during_its_start_is_cancelled_after_the_start() -> None:
    call = Slow()

    with pytest.raises(KeyboardInterrupt), closing(stream_interruptibly(call.start)) as messages:
        next(messages)
    assert not call.is_cancelled.is_set()
    call.may_start.put(None)

    assert call.is_cancelled.wait(TIMEOUT_S)


def test_an_error_at_the_start_of_a_call_is_raised_to_its_reader() -> None:
    def start() -> Slow:
        raise ValueError("a closed channel")

    with pytest.raises(ValueError, match="a closed channel"):
        next(stream_interruptibly(start))


def test_ctrl_c_while_the_command_imports_leaves_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_IT_IMPORTS], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_that_does_not_interrupt_the_wait_of_an_event_loop_ends_its_command() -> None:
    has_ended = threading.Event()
    woken_by_hand = []

    async def command() -> None:
        loop = asyncio.get_running_loop()
        waits_for = hex(loop._selector.fileno())  # type: ignore[attr-defined]

        def interrupt() -> None:
            await_value(
                lambda: MAIN_THREAD_CALL.read_text().split()[1:2],
                lambda call: waits_for in call,
                turn=partial(time.sleep, 0),
            )
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            if not has_ended.wait(TIMEOUT_S):
                woken_by_hand.append(True)
                loop.call_soon_threadsafe(lambda: None)

        with ThreadPoolExecutor() as threads:
            try:
                await loop.run_in_executor(threads, interrupt)
            finally:
                has_ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_interruptibly(command())
    assert not woken_by_hand
