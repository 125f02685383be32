"""Answers of past requests on this node, which new answers may repeat.

Answers of different owners are in different indices: no lookup sees those of another cache salt or
adapter, as with the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from baton.core.ids import PrefixKeys
from baton.engine.spec_decode.token_index import SEPARATOR, Match, TokenIndex

# A token takes up to 300 bytes: 80 MB in all.
MAX_PAST_TOKENS = 1 << 18
MAX_PAST_TOKENS_OF_ANSWER = 4096


class PastAnswers:
    """The newest answers, up to a number of tokens of all owners together."""

    def __init__(self, min_match: int, max_match: int, max_tokens: int = MAX_PAST_TOKENS) -> None:
        self._matches = min_match, max_match
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._index_of: dict[PrefixKeys, TokenIndex] = {}
        self._added: deque[tuple[PrefixKeys, int]] = deque()  # owner and tokens, oldest first

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, owner: PrefixKeys, token_ids: Sequence[int]) -> None:
        """Add an answer, with the tokens before it that it can be found by."""
        kept = [*token_ids[-MAX_PAST_TOKENS_OF_ANSWER:], SEPARATOR]
        index = self._index_of.get(owner)
        if index is None:
            index = self._index_of[owner] = TokenIndex(*self._matches)
        index.extend(kept)
        self._added.append((owner, len(kept)))
        self._num_tokens += len(kept)
        while self._num_tokens > self._max_tokens:
            self._drop_oldest()

    def matches(self, owner: PrefixKeys, newest: Sequence[int]) -> Iterable[Match]:
        index = self._index_of.get(owner)
        return () if index is None else index.matches(newest)

    def _drop_oldest(self) -> None:
        owner, num_tokens = self._added.popleft()
        index = self._index_of[owner]
        index.drop(num_tokens)
        self._num_tokens -= num_tokens
        if index.is_empty:
            del self._index_of[owner]
