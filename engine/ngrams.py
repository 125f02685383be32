"""What followed the newest tokens of a sequence the last time they were there.

The index grows with the sequence: a token costs one entry, and a question costs a handful of
comparisons, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Iterable

# Places that are looked at for the longest match; newer ones first.
MOST_LOOKED_AT = 8


class NgramIndex:
    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min = min_ngram
        self._max = max_ngram
        self._tokens: list[int] = []
        # Where the n-gram with this hash ended last. Two with one hash cost a comparison.
        self._last_end: dict[int, int] = {}
        self._end_before: list[int] = []  # by end: where the same one ended before that, or 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens, size = self._tokens, self._min
        for token_id in token_ids:
            # Only with a token behind it can an n-gram tell what follows.
            end = len(tokens)
            before = 0
            if end >= size:
                key = hash(tuple(tokens[end - size :]))
                before = self._last_end.get(key, 0)
                self._last_end[key] = end
            self._end_before.append(before)
            tokens.append(token_id)

    def proposal(self, most: int) -> list[int]:
        """What followed the longest of the newest n-grams that was there before, as far as known.

        Behind what is known it goes on with itself: a text that repeats is expected to go on so.
        """
        start = self._longest_match()
        if not start:
            return []
        proposed: list[int] = []
        num_known = len(self._tokens) - start
        for place in range(most):
            token = (
                self._tokens[start + place] if place < num_known else proposed[place - num_known]
            )
            proposed.append(token)
        return proposed

    def _longest_match(self) -> int:
        """Where it ended; 0 if there is none. Of equally long ones the newest."""
        tokens, size = self._tokens, self._min
        if len(tokens) < size:
            return 0
        end = self._last_end.get(hash(tuple(tokens[-size:])), 0)
        best, best_length = 0, size - 1
        for _ in range(MOST_LOOKED_AT):
            if not end or best_length == self._max:
                break
            length = self._length_of_match(end)
            if length > best_length:
                best, best_length = end, length
            end = self._end_before[end]
        return best

    def _length_of_match(self, end: int) -> int:
        tokens, most = self._tokens, min(self._max, end)
        newest = len(tokens)
        length = 0
        while length < most and tokens[end - 1 - length] == tokens[newest - 1 - length]:
            length += 1
        return length
