"""Proposer by the longest match: the tokens that followed where the newest ones occurred before.

It looks in the sequence itself, and by the method `suffix` also in past answers of the same cache
salt and adapter. A draft follows the most frequent tokens after the longest matches, as far as they
are probable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from baton.core.ids import PrefixKeys, RequestId
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import DraftRow, Drafts
from baton.engine.spec_decode.token_index import SEPARATOR, Match, TokenIndex

# Prompts are indexed over several steps, at about a microsecond a token: at once, a long one would
# delay all rows.
MAX_TOKENS_INDEXED_PER_STEP = 2048
# Of a draft, by the share of the longest matches that it follows.
MIN_PROBABILITY = 0.7
# A token takes up to 300 bytes: 80 MB in all.
MAX_PAST_TOKENS = 1 << 18
MAX_PAST_TOKENS_OF_ANSWER = 4096


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
