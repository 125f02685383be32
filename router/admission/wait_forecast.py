"""Estimates the wait for the first token of a new request. Pure."""

from __future__ import annotations

from collections import Counter, deque

# First tokens arrive in bunches, one per step: a rate needs many of them.
WINDOW_SIZE = 64


class FirstTokenForecast:
    """Counts the requests without a first token, and the rate at which first tokens arrive."""

    def __init__(self) -> None:
        self._num_by_priority: Counter[int] = Counter()
        # Times of the latest first tokens, on a clock that stops while no request waits.
        self._marks_s: deque[float] = deque([0.0], maxlen=WINDOW_SIZE + 1)
        self._awaited_s = 0.0  # reading of that clock
        self._since_s = 0.0  # time of that reading

    def note_arrival(self, priority: int, now: float) -> None:
        if not self._num_by_priority:
            self._since_s = now
        self._num_by_priority[priority] += 1

    def note_began(self, priority: int, now: float) -> None:
        """Record the first token of a request."""
        self._awaited_s += now - self._since_s
        self._since_s = now
        self._marks_s.append(self._awaited_s)
        self.note_left(priority)

    def note_left(self, priority: int) -> None:
        """Remove a request from those that wait for a first token."""
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]

    def wait_s(self, priority: int) -> float:
        """Estimate the wait; 0 if no request is ahead, so that the current rate can be measured."""
        ahead = sum(num for other, num in self._num_by_priority.items() if other <= priority)
        return (ahead + 1) * self._interval_s if ahead else 0.0

    @property
    def _interval_s(self) -> float:
        num = len(self._marks_s) - 1
        return (self._marks_s[-1] - self._marks_s[0]) / num if num else 0.0
