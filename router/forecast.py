"""How long a request that comes now would wait for its first token, as measured. Pure."""

from __future__ import annotations

from collections import Counter, deque

# First tokens come in bunches, a step's prompts at once: how fast they come, only many tell.
NUM_LOOKED_AT = 64


class Forecast:
    """Counts those that have no first token yet, and how fast these come."""

    def __init__(self) -> None:
        self._num_by_priority: Counter[int] = Counter()
        # On a clock that stands still while nobody waits: when the last first tokens came.
        self._marks_s: deque[float] = deque([0.0], maxlen=NUM_LOOKED_AT + 1)
        self._awaited_s = 0.0  # what that clock showed
        self._since_s = 0.0  # at this time

    def came(self, priority: int, now: float) -> None:
        if not self._num_by_priority:
            self._since_s = now
        self._num_by_priority[priority] += 1

    def began(self, priority: int, now: float) -> None:
        """It has its first token."""
        self._awaited_s += now - self._since_s
        self._since_s = now
        self._marks_s.append(self._awaited_s)
        self.left(priority)

    def left(self, priority: int) -> None:
        """It will not get one."""
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]

    def wait_s(self, priority: int) -> float:
        """0 when nobody is ahead: whoever comes then shows how fast it goes now."""
        ahead = sum(num for one, num in self._num_by_priority.items() if one <= priority)
        return (ahead + 1) * self._interval_s if ahead else 0.0

    @property
    def _interval_s(self) -> float:
        num = len(self._marks_s) - 1
        return (self._marks_s[-1] - self._marks_s[0]) / num if num else 0.0
