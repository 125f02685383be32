"""N-gram index of a sequence, which finds earlier occurrences of its newest tokens.

The index grows by one entry per token. A lookup takes a few comparisons, independent of the length
of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterable

# Candidates compared for the longest match, newest first.
MAX_CANDIDATES = 8


class NgramIndex:
    """Proposes tokens by the longest earlier match of the newest `min_ngram` to `max_ngram`."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min = min_ngram
        self._max = max_ngram
        self._tokens: list[int] = []
        # Last end of the n-gram with this hash. A hash collision costs only a comparison.
        self._last_end: dict[int, int] = {}
        self._end_before: list[int] = []  # by end: the previous end of the same n-gram, or 0

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        tokens, size = self._tokens, self._min
        for token_id in token_ids:
            # An n-gram is indexed once a token follows it.
            end = len(tokens)
            before = 0
            if end >= size:
                key = hash(tuple(tokens[end - size :]))
                before = self._last_end.get(key, 0)
                self._last_end[key] = end
            self._end_before.append(before)
            tokens.append(token_id)

    def proposal(self, max_tokens: int) -> list[int]:
        """Return the `max_tokens` tokens that followed the longest earlier match, or none.

        Past the end of the sequence, the proposal repeats itself, since the match and the end
        form a period of the text.
        """
        start = self._longest_match()
        if not start:
            return []
        proposed: list[int] = []
        num_known = len(self._tokens) - start
        for place in range(max_tokens):
            token = (
                self._tokens[start + place] if place < num_known else proposed[place - num_known]
            )
            proposed.append(token)
        return proposed

    def _longest_match(self) -> int:
        """Return the end of the longest earlier match, the newest if there are several, or 0."""
        tokens, size = self._tokens, self._min
        if len(tokens) < size:
            return 0
        end = self._last_end.get(hash(tuple(tokens[-size:])), 0)
        best, best_length = 0, size - 1
        for _ in range(MAX_CANDIDATES):
            if not end or best_length == self._max:
                break
            length = self._length_of_match(end)
            if length > best_length:
                best, best_length = end, length
            end = self._end_before[end]
        return best

    def _length_of_match(self, end: int) -> int:
        tokens, max_length = self._tokens, min(self._max, end)
        newest = len(tokens)
        length = 0
        while length < max_length and tokens[end - 1 - length] == tokens[newest - 1 - length]:
            length += 1
        return length
