"""Proposer by the longest match: the tokens that followed where the newest ones occurred before.

It looks in the sequence itself, and by the method `suffix` also in past answers of the same cache
salt and adapter. A draft follows the most frequent tokens after the longest matches, as far as they
are probable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from baton.core.ids import PrefixKeys, RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts

# Prompts are indexed over several steps, at about a microsecond a token: at once, a long one would
# delay all rows.
MAX_TOKENS_INDEXED_PER_STEP = 2048
# Of a draft, by the share of the longest matches that it follows.
MIN_PROBABILITY = 0.7
# A token takes up to 300 bytes: 80 MB in all.
MAX_PAST_TOKENS = 1 << 18
MAX_PAST_TOKENS_OF_ANSWER = 4096
# Places compared in a lookup, newest first.
MAX_CANDIDATES = 4
# Ends a sequence. No token has this number, so that no match and no draft crosses it.
SEPARATOR = -1
# Of two indexed lengths, the longer one finds long matches among many short ones.
LONG_MATCH = 8


class SuffixProposer:
    """Implements `Proposer`."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation = speculation
        self._by_request: dict[RequestId, _SequenceDrafter] = {}
        self._past: PastAnswers | None = None
        if speculation.method == "suffix":
            self._past = PastAnswers(speculation.min_ngram, speculation.max_ngram)

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        drafts: dict[RequestId, Sequence[int]] = {}
        num_indexed = 0
        for row in rows:
            drafter = self._drafter_of(row)
            num_indexed += drafter.index(row, MAX_TOKENS_INDEXED_PER_STEP - num_indexed)
            draft = drafter.draft(row, min(row.max_tokens, max_tokens), self._past)
            if draft:
                drafts[row.request_id] = draft
                max_tokens -= len(draft)
            if not max_tokens:
                break
        return drafts

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        for request_id, row in rows.items():
            self._by_request.pop(request_id, None)
            if self._past is not None:
                self._remember(row, self._past)

    def _drafter_of(self, row: DraftRow) -> _SequenceDrafter:
        drafter = self._by_request.get(row.request_id)
        if drafter is None:
            drafter = self._by_request[row.request_id] = _SequenceDrafter(self._speculation, row)
        return drafter

    def _remember(self, row: DraftRow, past: PastAnswers) -> None:
        # The newest token may be unknown: a pass that samples it can be in flight.
        num_answered = len(row.known_tokens) - 1 - row.num_prompt_tokens
        if num_answered >= self._speculation.min_ngram:
            first = max(0, row.num_prompt_tokens - self._speculation.max_ngram)
            past.add(row.prefix_keys, row.known_tokens[first:-1].tolist())


class _SequenceDrafter:
    """Draft state of one sequence."""

    def __init__(self, speculation: Speculation, row: DraftRow) -> None:
        self._index = TokenIndex(speculation.min_ngram, speculation.max_ngram)
        self._predicted = _predicted_text(row, speculation.max_ngram)  # indexed before the sequence

    def index(self, row: DraftRow, max_tokens: int) -> int:
        """Index what the prediction and the sequence have more. Returns how many tokens."""
        first = self._index.num_tokens
        new_tokens = self._predicted[first : first + max_tokens]
        max_tokens -= len(new_tokens)
        known = max(0, first - len(self._predicted))
        new_tokens += row.known_tokens[known : known + max_tokens].tolist()
        self._index.extend(new_tokens)
        return len(new_tokens)

    def draft(self, row: DraftRow, max_tokens: int, past: PastAnswers | None) -> list[int]:
        if self._index.num_tokens < len(self._predicted) + len(row.known_tokens):
            return []
        newest = self._index.newest()
        matches = self._index.matches(newest)
        if past is not None:
            matches += past.matches(row.prefix_keys, newest)
        return continue_matches(matches, max_tokens)


def _predicted_text(row: DraftRow, num_before: int) -> list[int]:
    """Return the client's prediction as if it were a past answer to the end of the prompt."""
    if not row.predicted_token_ids:
        return []
    end = row.num_prompt_tokens
    before = row.known_tokens[max(0, end - num_before) : end].tolist()
    return [*before, *row.predicted_token_ids, SEPARATOR]


def continue_matches(matches: Sequence[Match], max_tokens: int) -> list[int]:
    """Return the most frequent tokens after the longest matches; the first match wins ties."""
    longest = max((match.length for match in matches), default=0)
    followed = [match for match in matches if match.length == longest]
    min_followed = MIN_PROBABILITY * len(followed)
    draft: list[int] = []
    while followed and len(draft) < max_tokens:
        by_token: dict[int, list[Match]] = {}
        for match in followed:
            by_token.setdefault(_next_token(match, draft), []).append(match)
        token, followed = max(by_token.items(), key=lambda item: len(item[1]))
        if token == SEPARATOR or len(followed) < min_followed:
            break
        draft.append(token)
    return draft


def _next_token(match: Match, draft: Sequence[int]) -> int:
    """Return the token after a match and a draft.

    Behind the newest token of the sequence the draft repeats itself, since the match and the end
    form a period of the text.
    """
    end = match.end + len(draft)
    token = match.source.token_at(end)
    return draft[end - match.source.num_tokens] if token is None else token


class PastAnswers:
    """The newest answers, up to a number of tokens of all owners together.

    Answers of different owners are in different indices: no lookup sees those of another cache salt
    or adapter, as with the prefix cache.
    """

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


class Match(NamedTuple):
    """Place in an index before which the newest tokens of a sequence occur."""

    source: TokenIndex
    end: int  # position after the match
    length: int


class TokenIndex:
    """Places by the `min_match` tokens before them, and by the `LONG_MATCH` tokens before them.

    Positions count from the first token ever indexed, also after `drop`.

    It grows by a few entries per token, like the hash chains of a compressor. A lookup compares a
    fixed number of places, whatever the length of the text.
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
