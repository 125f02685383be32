"""Process termination by the parent process: its death, or SIGTERM during the start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


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
