"""Backoff and limit of the restarts of a process. Pure."""

from __future__ import annotations

MAX_RESTARTS = 5  # in a row
MAX_DELAY_S = 30.0
STABLE_S = 60.0  # a process that served so long was started successfully


class RestartBackoff:
    """Delays between the restarts of one process: 1 s, then twice as long each time."""

    def __init__(self) -> None:
        self.num_restarts = 0  # since it last served for STABLE_S
        self._up_s: float | None = None

    def note_up(self, now: float) -> None:
        """Note that the process serves."""
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
