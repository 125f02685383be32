"""What a test does to a process of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from baton.cluster import Child


@contextmanager
def standing_still(*children: Child) -> Iterator[None]:
    """Processes that are there and do nothing. Those that are killed meanwhile stay so."""
    for child in children:
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        for child in children:
            child.process.send_signal(signal.SIGCONT)
