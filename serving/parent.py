"""How a process ends by the will of the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """SIGTERM for this process when the parent is gone, however it went. Linux alone has this."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:  # gone before we could ask
        sys.exit("the parent process is gone")


def end_when_told() -> None:
    """Until `stop_signal` takes over, SIGTERM ends the process with the code that shells give.

    Without this the first process of a container, which has no handlers of the system's, would
    sit through it: while a model is loaded, until SIGKILL.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
