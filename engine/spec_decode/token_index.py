"""Index of token sequences, which finds where the newest tokens of a sequence occurred before.

It grows by a few entries per token, like the hash chains of a compressor. A lookup compares a fixed
number of places, whatever the length of the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Places compared in a lookup, newest first.
MAX_CANDIDATES = 4
# Ends a sequence. No token has this number, so that no match and no draft crosses it.
SEPARATOR = -1
# Of two indexed lengths, the longer one finds long matches among many short ones.
LONG_MATCH = 8


class Match(NamedTuple):
    """Place in an index before which the newest tokens of a sequence occur."""

    source: TokenIndex
    end: int  # position after the match
    length: int


class TokenIndex:
    """Places by the `min_match` tokens before them, and by the `LONG_MATCH` tokens before them.

    Positions count from the first token ever indexed, also after `drop`.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self._max = max_match
        self._min = min_match
        sizes = (LONG_MATCH, min_match) if min_match < LONG_MATCH <= max_match else (min_match,)
        self._chains = [_Chain(size) for size in sizes]
        self._first = 0  # position of the first token that is kept
        self._tokens: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens ever indexed: the position after the newest."""
        return self._first + len(self._tokens)

    @property
    def is_empty(self) -> bool:
        return not self._tokens

    def extend(self, token_ids: Iterable[int]) -> None:
        self._tokens += token_ids
        for chain in self._chains:
            chain.extend(self._tokens, self._first)

    def drop(self, num_tokens: int) -> None:
        """Drop the oldest tokens."""
        for chain in self._chains:
            chain.drop(self._tokens, self._first, num_tokens)
        del self._tokens[:num_tokens]
        self._first += num_tokens

    def newest(self) -> list[int]:
        """Return the newest tokens, as many as a match can have."""
        return self._tokens[-self._max :]

    def matches(self, newest: Sequence[int]) -> list[Match]:
        """Return the newest places before which at least `min_match` of these tokens occur.

        If the last `LONG_MATCH` tokens occur anywhere, all places are of that kind.
        """
        for chain in self._chains:
            if found := list(self._matches_in(chain, newest)):
                return found
        return []

    def token_at(self, position: int) -> int | None:
        """Return the token at a position; None behind the newest token."""
        place = position - self._first
        return self._tokens[place] if place < len(self._tokens) else None

    def _matches_in(self, chain: _Chain, newest: Sequence[int]) -> Iterable[Match]:
        for end in chain.ends(newest, self._first):
            length = self._match_length(end - self._first, newest)
            if length >= chain.size:  # otherwise, another n-gram has the same hash
                yield Match(self, end, length)

    def _match_length(self, place: int, newest: Sequence[int]) -> int:
        tokens, max_length = self._tokens, min(self._max, place, len(newest))
        length = 0
        while length < max_length and tokens[place - 1 - length] == newest[-1 - length]:
            length += 1
        return length


class _Chain:
    """Places after equal n-grams of one size, each linked to the one before."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._last_end: dict[int, int] = {}  # by the hash of an n-gram
        self._end_before: list[int] = []  # by place: the end before of the same hash, or 0

    def extend(self, tokens: Sequence[int], first: int) -> None:
        """Index all places that a token follows."""
        size, last_end, end_before = self.size, self._last_end, self._end_before
        start = len(end_before)
        end_before += [0] * (min(size, len(tokens)) - start)
        for place in range(max(start, size), len(tokens)):
            key = hash(tuple(tokens[place - size : place]))
            end_before.append(last_end.get(key, 0))
            last_end[key] = first + place

    def ends(self, newest: Sequence[int], first: int) -> Iterable[int]:
        if len(newest) < self.size:
            return
        end = self._last_end.get(hash(tuple(newest[-self.size :])), 0)
        for _ in range(MAX_CANDIDATES):
            if end - self.size < first or not end:  # its tokens are dropped, or there is none
                return
            yield end
            end = self._end_before[end - first]

    def drop(self, tokens: Sequence[int], first: int, num_tokens: int) -> None:
        for place in range(self.size, min(num_tokens + self.size, len(tokens))):
            key = hash(tuple(tokens[place - self.size : place]))
            if self._last_end.get(key) == first + place:
                del self._last_end[key]
        del self._end_before[:num_tokens]
