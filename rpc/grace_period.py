"""Time limit of a process's shutdown."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, num_unfinished: Callable[[], int]) -> None:
        """Start the timer."""
        self._timer = threading.Timer(self._timeout_s, self._cut_off, (num_unfinished,))
        self._timer.daemon = True
        self._timer.start()

    def _cut_off(self, num_unfinished: Callable[[], int]) -> None:
        unfinished = f"{num_unfinished()} requests unfinished"
        log.error("the drain took longer than %g s, %s: exiting", self._timeout_s, unfinished)
        os._exit(CUT_OFF)
