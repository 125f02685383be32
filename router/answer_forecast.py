"""How long an answer will take from its turn to its end, as answers went lately. Pure."""

from __future__ import annotations

# How much of each estimate the newest answer makes up.
NEWEST_SHARE = 0.1
FEWEST_TOKENS = 2  # that tell how fast they come


class AnswerForecast:
    def __init__(self) -> None:
        self._token_s: float | None = (
            None  # for each token, the wait for the first one spread over all
        )
        self._num_tokens: float | None = None  # of a whole answer
        self._num_beside = 0.0  # requests under way meanwhile

    def given(
        self, num_tokens: int, lasted_s: float, num_under_way: int, *, is_whole: bool
    ) -> None:
        """What came of an answer from its turn on, itself counted among those under way.

        Those that broke off tell how fast tokens come, too: else nobody would, when all are late.
        """
        if num_tokens >= FEWEST_TOKENS:
            token_s = lasted_s / num_tokens
            self._num_beside = _nearer(self._num_beside, num_under_way, is_first=not self._token_s)
            self._token_s = _nearer(self._token_s or 0.0, token_s, is_first=not self._token_s)
        before = self._num_tokens or 0.0
        if is_whole or num_tokens > before:
            self._num_tokens = _nearer(before, num_tokens, is_first=not before)

    def lasts_s(self, max_tokens: int | None, num_under_way: int) -> float:
        """For one that comes beside so many: 0 if nobody is there, who would show how it goes.

        Fewer than there were go as much faster, at best; more are not held to go slower before
        that was seen.
        """
        if not num_under_way or self._token_s is None or self._num_tokens is None:
            return 0.0
        num_tokens = min(self._num_tokens, max_tokens or self._num_tokens)
        share = min(1.0, (num_under_way + 1) / max(1.0, self._num_beside))
        return num_tokens * self._token_s * share


def _nearer(before: float, newest: float, *, is_first: bool) -> float:
    return newest if is_first else before + NEWEST_SHARE * (newest - before)
