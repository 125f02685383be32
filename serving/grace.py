"""How long the end of a process may take. What hangs is not waited for beyond that."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType

from engine.errors import InvalidConfig

DRAIN_TIMEOUT_S = 240.0
CUT_OFF = 1  # the exit code

log = logging.getLogger(__name__)


class Grace:
    """Around all that a process does: once begun, the process is over when the time is.

    A thread that hangs, such as an engine's in a forward pass, cannot be ended from within, and
    nothing that it works on can be given back. So the process ends at once, as by a signal.
    """

    def __init__(self, timeout_s: float) -> None:
        if not timeout_s >= 0:
            raise InvalidConfig(f"--drain-timeout-s {timeout_s}: it must be 0 seconds or more")
        self._timeout_s = timeout_s
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Grace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, num_unfinished: Callable[[], int]) -> None:
        """The time runs from now on."""
        self._timer = threading.Timer(self._timeout_s, self._cut_off, (num_unfinished,))
        self._timer.daemon = True
        self._timer.start()

    def _cut_off(self, num_unfinished: Callable[[], int]) -> None:
        what = f"{num_unfinished()} requests unfinished"
        log.error("not at its end after %g s, %s: it is cut off", self._timeout_s, what)
        os._exit(CUT_OFF)
