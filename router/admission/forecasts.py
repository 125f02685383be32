"""Estimates of a request's wait for its first token, and of the duration of its answer. Pure."""

from __future__ import annotations

from collections import Counter, deque

# First tokens arrive in bunches, one per step: a rate needs many of them.
WINDOW_SIZE = 64
# Weight of the newest answer in the moving averages.
NEWEST_WEIGHT = 0.1
MIN_MEASURED_TOKENS = 2  # that an answer needs for its pace to count


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

    def note_first_token(self, priority: int, now: float) -> None:
        self._awaited_s += now - self._since_s
        self._since_s = now
        self._marks_s.append(self._awaited_s)
        self.note_left(priority)

    def note_left(self, priority: int) -> None:
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


class AnswerForecast:
    def __init__(self) -> None:
        # Seconds per token, with the wait for the first one spread over all.
        self._token_s: float | None = None
        self._num_tokens: float | None = None  # of a complete answer
        self._num_concurrent = 0.0  # requests in flight during an answer

    def note_answer(
        self, num_tokens: int, duration_s: float, num_under_way: int, *, is_whole: bool
    ) -> None:
        """Record an answer. `num_under_way` includes it.

        The pace of incomplete answers counts too: otherwise nothing would be learnt while all
        requests exceed their deadlines.
        """
        if num_tokens >= MIN_MEASURED_TOKENS:
            token_s = duration_s / num_tokens
            is_first = not self._token_s
            self._num_concurrent = _average(self._num_concurrent, num_under_way, is_first=is_first)
            self._token_s = _average(self._token_s or 0.0, token_s, is_first=is_first)
        before = self._num_tokens or 0.0
        if is_whole or num_tokens > before:
            self._num_tokens = _average(before, num_tokens, is_first=not before)

    def duration_s(self, max_tokens: int | None, num_under_way: int) -> float:
        """Estimate the duration of an answer next to `num_under_way` others; 0 without others.

        With less concurrency than measured, the estimate is proportionally lower: the best case.
        With more, it stays the same until that has been measured.
        """
        if not num_under_way or self._token_s is None or self._num_tokens is None:
            return 0.0
        num_tokens = min(self._num_tokens, max_tokens or self._num_tokens)
        share = min(1.0, (num_under_way + 1) / max(1.0, self._num_concurrent))
        return num_tokens * self._token_s * share


def _average(before: float, newest: float, *, is_first: bool) -> float:
    return newest if is_first else before + NEWEST_WEIGHT * (newest - before)
