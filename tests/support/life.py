"""What a test does to a process of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from baton.cluster import Child


@contextmanager
def standing_still(child: Child) -> Iterator[None]:
    """A process that is there and does nothing."""
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(child.process.pid, signal.SIGCONT)
