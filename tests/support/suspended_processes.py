"""Suspension of cluster processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from baton.cluster import Child


@contextmanager
def suspended(*children: Child) -> Iterator[None]:
    """Stop these processes (SIGSTOP) within the block. Killed ones stay dead."""
    for child in children:
        os.kill(child.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        for child in children:
            child.process.send_signal(signal.SIGCONT)
