"""End of a process: by its parent, by SIGTERM, and the time limit of its shutdown."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated

from baton.core.options import NETWORK, Option

DRAIN_TIMEOUT_S = 240.0
DrainTimeout = Annotated[
    float,
    Option(
        "Seconds to finish running requests after SIGTERM; the process then ends at once.",
        NETWORK,
        at_least=0,
    ),
]
CUT_OFF = 1  # the exit code
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


class ShutdownDeadline:
    """Context of a process's whole run. Once `begin` is called, the process exits in time.

    A hanging thread, such as the engine's in a forward pass, cannot be ended from within the
    process, nor can its resources be released. So the process exits at once, as by a signal.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._timer: threading.Timer | None = None

    def __enter__(self) -> ShutdownDeadline:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, num_unfinished: Callable[[], int]) -> None:
        self._timer = threading.Timer(self._timeout_s, self._cut_off, (num_unfinished,))
        self._timer.daemon = True
        self._timer.start()

    def _cut_off(self, num_unfinished: Callable[[], int]) -> None:
        unfinished = f"{num_unfinished()} requests unfinished"
        log.error("the drain took longer than %g s, %s: exiting", self._timeout_s, unfinished)
        os._exit(CUT_OFF)


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when its parent ends. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # the parent ended before the prctl call
        sys.exit("the parent process is gone")


def exit_on_sigterm() -> None:
    """Exit on SIGTERM with the shells' exit code, until `stop_signal` replaces the handler.

    PID 1 of a container has no default signal handlers. Without this handler it would ignore
    SIGTERM while a model is loaded, until SIGKILL.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
