"""Restarts of dead nodes by `baton up --restart`."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from baton.cluster import Child, LocalCluster

MAX_RESTARTS = 5  # in a row
MAX_DELAY_S = 30.0
STABLE_S = 60.0  # a process that served so long was started successfully

Call = Callable[[], None]


class RestartBackoff:
    """Delays between the restarts of one process: 1 s, then twice as long each time."""

    def __init__(self) -> None:
        self.num_restarts = 0  # since it last served for STABLE_S
        self._up_s: float | None = None

    def note_up(self, now: float) -> None:
        self._up_s = now

    def next_delay_s(self, now: float) -> float | None:
        """Return the delay until the next restart, or None when the limit is reached."""
        if self._up_s is not None and now - self._up_s >= STABLE_S:
            self.num_restarts = 0
        self._up_s = None
        if self.num_restarts == MAX_RESTARTS:
            return None
        self.num_restarts += 1
        return min(MAX_DELAY_S, 2.0 ** (self.num_restarts - 1))


class NodeRestarts:
    """Restarts nodes that died, after a delay. Methods are called on the main thread."""

    def __init__(self, cluster: LocalCluster, call_soon: Callable[[Call], None]) -> None:
        """`call_soon` has a function called on the main thread, unless the cluster ends."""
        self._cluster = cluster
        self._call_soon = call_soon
        self._backoffs: defaultdict[str, RestartBackoff] = defaultdict(RestartBackoff)
        self._is_ended = False

    def plan(self, ended: Child, code: int) -> tuple[str, bool]:
        """Plan the restart of a node. Return a message, and whether it is restarted."""
        if code == 0:
            return "it is not restarted: it was told to end", False
        backoff = self._backoffs[ended.name]
        delay_s = backoff.next_delay_s(time.monotonic())
        if delay_s is None:
            return f"it is not restarted: it died after each of {MAX_RESTARTS} restarts", False
        timer = threading.Timer(delay_s, self._call_soon, [partial(self._restart, ended)])
        timer.daemon = True  # if the cluster ends before, nothing waits for it
        timer.start()
        return f"restarting it in {delay_s:.0f} s ({backoff.num_restarts} of {MAX_RESTARTS})", True

    def end(self) -> None:
        """Restart no node any more. Safe in a signal handler."""
        self._is_ended = True

    def _restart(self, ended: Child) -> None:
        if not self._is_ended:
            self._cluster.begin_restart(ended, self._note_settled)

    def _note_settled(self, child: Child) -> None:
        """Report a node that listens again. Called on the thread that reads its output."""
        if child.address:
            self._call_soon(partial(self._on_up, child))

    def _on_up(self, child: Child) -> None:
        self._backoffs[child.name].note_up(time.monotonic())
        print(f"baton: {child.name} was restarted on {child.address}", file=sys.stderr)
