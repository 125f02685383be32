"""Drafts by the longest match, of the sequence, of past answers and of a prediction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.core.errors import InvalidConfig
from baton.core.ids import PrefixKeys, RequestId
from baton.engine.spec_decode.config import Speculation, parse_speculation
from baton.engine.spec_decode.proposer import DraftRow
from baton.engine.spec_decode.suffix_proposer import (
    MAX_CANDIDATES,
    MAX_TOKENS_INDEXED_PER_STEP,
    MIN_PROBABILITY,
    PastAnswers,
    SuffixProposer,
    TokenIndex,
    continue_matches,
)

NAME = RequestId("r")
REPEATING = [1, 2, 3, 4] * 4


def row_of(
    tokens: Sequence[int], *, most: int = 8, num_prompt_tokens: int = 0, salt: str = ""
) -> DraftRow:
    known_tokens = np.array(tokens, dtype=np.int64)
    return DraftRow(NAME, known_tokens, most, num_prompt_tokens, (), PrefixKeys(salt))


def draft(
    proposer: SuffixProposer, tokens: Sequence[int] = REPEATING, *, most: int = 8
) -> list[int]:
    return list(proposer.propose([row_of(tokens, most=most)], most).get(NAME, ()))


def drafted(proposer: SuffixProposer, tokens: Sequence[int] = REPEATING, *, most: int = 8) -> int:
    return len(draft(proposer, tokens, most=most))


def test_drafts_have_at_most_the_wanted_length() -> None:
    proposer = SuffixProposer(Speculation(num_tokens=4))

    assert draft(proposer, most=5) == [1, 2, 3, 4, 1]
    assert draft(proposer, most=2) == [1, 2]


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    proposer = SuffixProposer(Speculation(num_tokens=4))
    prompt = [1, 2] * MAX_TOKENS_INDEXED_PER_STEP

    assert [drafted(proposer, prompt) for _ in range(2)] == [0, 8]


def test_a_request_that_returns_to_the_batch_is_indexed_again() -> None:
    proposer = SuffixProposer(Speculation(num_tokens=4))
    drafted(proposer)

    proposer.forget({NAME: row_of(REPEATING), RequestId("never seen"): row_of([5])})

    assert draft(proposer, [7, 8, 9, 6, 7, 8, 9], most=1) == [6]


SUFFIX = Speculation(num_tokens=4, method="suffix")
PROMPT, ANSWER = [1, 2, 3], [4, 5, 6, 7, 8]


def after_an_answer(speculation: Speculation = SUFFIX) -> SuffixProposer:
    proposer = SuffixProposer(speculation)
    row = row_of([*PROMPT, *ANSWER, 0], num_prompt_tokens=len(PROMPT), salt="a")
    proposer.forget({NAME: row})
    return proposer


@pytest.mark.parametrize(
    ("newest", "expected"),
    [([9, *PROMPT], ANSWER), ([1, 9, 4, 5, 6], [7, 8]), ([6, 7, 8], []), ([5, 6, 9], [])],
)
def test_a_past_answer_is_followed_up_to_its_end(newest: list[int], expected: list[int]) -> None:
    drafts = after_an_answer().propose([row_of(newest, salt="a")], 8)

    assert list(drafts.get(NAME, ())) == expected


@pytest.mark.parametrize("salt", ["", "b", "a\0"])
def test_a_past_answer_is_not_followed_under_another_salt(salt: str) -> None:
    assert not after_an_answer().propose([row_of([9, 4, 5, 6], salt=salt)], 8)


def test_by_ngrams_past_answers_are_not_kept() -> None:
    proposer = after_an_answer(Speculation(num_tokens=4))

    assert not proposer.propose([row_of([9, 4, 5, 6], salt="a")], 8)


def predicted(outputs: Sequence[int], proposer: SuffixProposer | None = None) -> list[int]:
    """Return what is drafted after `outputs` if `ANSWER` was predicted."""
    row = row_of([*PROMPT, *outputs], num_prompt_tokens=len(PROMPT))
    proposer = proposer or SuffixProposer(SUFFIX)
    row = row._replace(predicted_token_ids=tuple(ANSWER))
    return list(proposer.propose([row], 8).get(NAME, ()))


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ([], ANSWER),
        (ANSWER[:1], ANSWER[1:]),
        (ANSWER, []),
        ([9], []),
        ([9, 5, 6], []),
        ([9, 5, 6, 7], [8]),
        ([*ANSWER[:3], 9], []),
    ],
)
def test_a_prediction_is_followed_from_its_beginning_and_again_after_a_change(
    outputs: list[int], expected: list[int]
) -> None:
    assert predicted(outputs) == expected


def test_a_prediction_is_no_past_answer() -> None:
    proposer = SuffixProposer(SUFFIX)
    predicted([9], proposer)

    proposer.forget({NAME: row_of([*PROMPT, 9, 9, 9, 9, 9], num_prompt_tokens=len(PROMPT))})

    assert not proposer.propose([row_of([1, 2, 3, *ANSWER[:3]])], 8)


def test_the_prompts_of_past_requests_are_not_kept() -> None:
    proposer = SuffixProposer(SUFFIX)
    prompt = [*range(10, 10 + 2 * SUFFIX.max_ngram)]

    proposer.forget({NAME: row_of([*prompt, *ANSWER, 0], num_prompt_tokens=len(prompt))})

    assert not proposer.propose([row_of(prompt[:9])], 8)
    assert proposer.propose([row_of(prompt)], 8)


# --- what a draft follows -----------------------------------------------------------


def continued(tokens: Sequence[int], *, max_tokens: int = 5, max_match: int = 4) -> list[int]:
    index = TokenIndex(2, max_match)
    index.extend(tokens)
    return continue_matches(index.matches(index.newest()), max_tokens)


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2), (1, 2, 3, 4), (1, 2, 3, 2, 1)])
def test_without_a_match_there_is_no_draft(tokens: tuple[int, ...]) -> None:
    assert continued(tokens) == []


def test_a_longer_match_takes_precedence_over_a_newer_one() -> None:
    tokens = (9, 1, 2, 3, 7, 7, 8, 2, 3, 5, 9, 1, 2, 3)

    assert continued(tokens, max_tokens=1) == [7]


def test_the_most_frequent_token_after_the_longest_matches_is_followed() -> None:
    assert continued((1, 2, 4, *(1, 2, 3) * 3, 9, 1, 2), max_match=2, max_tokens=1) == [3]


def test_a_draft_ends_where_its_tokens_are_not_probable() -> None:
    tokens = (*(1, 2, 3, 4), *(1, 2, 3, 5), *(1, 2))

    assert continued(tokens, max_match=2) == [3]


def test_a_repeating_text_is_continued_periodically() -> None:
    assert continued((5, 1, 2, 1, 2)) == [1, 2, 1, 2, 1]
    assert continued((7, 7, 7)) == [7, 7, 7, 7, 7]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=3),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_proposals_equal_those_of_a_linear_search(
    tokens: list[int], answers: list[list[int]], min_ngram: int, more: int
) -> None:
    own = TokenIndex(min_ngram, min_ngram + more)
    past = PastAnswers(min_ngram, min_ngram + more)
    for answer in answers:
        past.add(PrefixKeys(), answer)
    for place, token in enumerate(tokens):
        own.extend([token])
        newest, known = own.newest(), tokens[: place + 1]
        matches = [*own.matches(newest), *past.matches(PrefixKeys(), newest)]
        expected = searched(known, answers, min_ngram, min_ngram + more, max_tokens=3)
        assert continue_matches(matches, 3) == expected


def searched(
    tokens: list[int], answers: list[list[int]], min_size: int, max_size: int, max_tokens: int
) -> list[int]:
    """Return the draft of a linear search, over texts that end where nothing can follow."""
    texts = [(end, tokens) for end in range(len(tokens) - 1, min_size - 1, -1)]
    own = [(common(text[:end], tokens, max_size), end, text) for end, text in texts]
    ends = [(end, text) for text in reversed(answers) for end in range(len(text), min_size - 1, -1)]
    past = [(common(text[:end], tokens, max_size), end, text) for end, text in ends]
    found = [
        each
        for places in (own, past)
        for each in [each for each in places if each[0] >= min_size][:MAX_CANDIDATES]
    ]
    longest = max((length for length, *_ in found), default=0)
    followed = [(end, text) for length, end, text in found if length == longest]
    num_followed, draft = len(followed), list[int]()
    while followed and len(draft) < max_tokens:
        following = []
        for end, text in followed:
            known = text + draft if text is tokens else text
            place = end + len(draft)
            following.append(known[place] if place < len(known) else -1)
        token = max(following, key=lambda each: (following.count(each), -following.index(each)))
        if token == -1 or following.count(token) < MIN_PROBABILITY * num_followed:
            break
        followed = [
            each
            for each, next_token in zip(followed, following, strict=True)
            if next_token == token
        ]
        draft.append(token)
    return draft


def common(before: Sequence[int], newest: Sequence[int], max_size: int) -> int:
    """Return the length of the common end of two sequences."""
    length = 0
    while length < min(max_size, len(before), len(newest)):
        if before[-1 - length] != newest[-1 - length]:
            break
        length += 1
    return length


# --- settings -----------------------------------------------------------------------


def test_speculation_settings_are_parsed() -> None:
    assert parse_speculation("ngram:5") == Speculation(num_tokens=5)
    assert parse_speculation("suffix:5") == Speculation(num_tokens=5, method="suffix")
    assert parse_speculation("mtp:2:fixed") == Speculation(2, method="mtp", is_adaptive=False)
    assert parse_speculation("auto") == Speculation(32, method="auto")
    assert parse_speculation("") is None
    assert parse_speculation("none") is None


@pytest.mark.parametrize(
    "written",
    ["ngram", "ngram:", "ngram:0", "ngram:33", "ngram:x", "eagle2:3", "ngram:3:", "mtp:2:f"],
)
def test_malformed_speculation_settings_are_refused(written: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_speculation(written)


def test_ngrams_of_length_zero_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        Speculation(4, min_ngram=0)
    with pytest.raises(InvalidConfig):
        Speculation(4, min_ngram=3, max_ngram=2)
