"""Drafts: tokens that are guessed to come next, so that one step can confirm several.

Each sequence has what it takes to guess (an index of its n-grams) and a memory of how good the
guesses were: where they fail, fewer and fewer are made, so that failing costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.ngrams import NgramIndex
from engine.request import RequestId
from engine.speculation import Speculation

# A long prompt is read over some steps, or the first would hold up all others.
MOST_READ_AT_ONCE = 4096
LONGEST_PAUSE = 64  # steps

# A sequence's tokens from a place on, at most so many.
TokensFrom = Callable[[int, int], Sequence[int]]


class Drafter:
    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._by_request: dict[RequestId, _Guesser] = {}

    def draft(self, request_id: RequestId, tokens_from: TokensFrom, most: int) -> list[int]:
        """For a sequence whose newest token is about to be computed. Maybe nothing."""
        guesser = self._by_request.get(request_id)
        if guesser is None:
            guesser = self._by_request[request_id] = _Guesser(self._speculation)
        return guesser.draft(tokens_from, most)

    def judged(self, request_id: RequestId, num_proposed: int, num_accepted: int) -> None:
        self._by_request[request_id].judged(num_proposed, num_accepted)

    def forget(self, request_ids: Iterable[RequestId]) -> None:
        for request_id in request_ids:
            self._by_request.pop(request_id, None)


class _Guesser:
    """Of one sequence."""

    def __init__(self, speculation: Speculation) -> None:
        self._index = NgramIndex(speculation.min_ngram, speculation.max_ngram)
        self._longest = speculation.num_tokens
        self._length = speculation.num_tokens
        self._num_failures = 0  # in a row
        self._pause = 0  # steps to sit out

    def draft(self, tokens_from: TokensFrom, most: int) -> list[int]:
        news = tokens_from(self._index.num_tokens, MOST_READ_AT_ONCE)
        self._index.extend(news)
        if self._pause:
            self._pause -= 1
            return []
        if len(news) == MOST_READ_AT_ONCE:
            return []
        return self._index.proposal(min(most, self._length))

    def judged(self, num_proposed: int, num_accepted: int) -> None:
        """Twice as long as what came true the next time; a pause that doubles where nothing did."""
        if num_accepted:
            self._num_failures = 0
            self._length = min(self._longest, 2 * num_accepted)
            return
        self._num_failures += 1
        self._length = 1 if self._num_failures > 1 else max(1, self._longest // 2)
        self._pause = min(LONGEST_PAUSE, 2 ** (self._num_failures - 1) - 1)
