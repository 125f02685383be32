"""How long a request that comes now would wait for its first token, as measured. Pure."""

from __future__ import annotations

from collections import Counter

# How much of the estimate the newest interval between two first tokens makes up.
NEWEST_SHARE = 0.1


class Forecast:
    """Counts those that have no first token yet, and how fast these come."""

    def __init__(self) -> None:
        self._num_by_priority: Counter[int] = Counter()
        self._interval_s: float | None = None
        self._since_s = 0.0  # the last first token, or the first request after nobody waited

    def came(self, priority: int, now: float) -> None:
        if not self._num_by_priority:
            self._since_s = now
        self._num_by_priority[priority] += 1

    def began(self, priority: int, now: float) -> None:
        """It has its first token."""
        newest_s = now - self._since_s
        before_s = newest_s if self._interval_s is None else self._interval_s
        self._interval_s = before_s + NEWEST_SHARE * (newest_s - before_s)
        self._since_s = now
        self.left(priority)

    def left(self, priority: int) -> None:
        """It will not get one."""
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]

    def wait_s(self, priority: int) -> float:
        """0 when nobody is ahead: whoever comes then shows how fast it goes now."""
        ahead = sum(num for one, num in self._num_by_priority.items() if one <= priority)
        return (ahead + 1) * self._interval_s if ahead and self._interval_s is not None else 0.0
