"""N-gram index: its proposals equal those of a linear search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.spec_decode.ngram_index import MAX_CANDIDATES, NgramIndex


def index_of(tokens: Sequence[int], *, min_ngram: int = 2, max_ngram: int = 4) -> NgramIndex:
    index = NgramIndex(min_ngram, max_ngram)
    index.extend(tokens)
    return index


@pytest.mark.parametrize("tokens", [(), (1,), (1, 2), (1, 2, 3, 4), (1, 2, 3, 2, 1)])
def test_unseen_ngrams_propose_nothing(tokens: tuple[int, ...]) -> None:
    assert index_of(tokens).proposal(5) == []


def test_the_tokens_after_a_match_are_proposed() -> None:
    assert index_of((1, 2, 3, 4, 5, 1, 2)).proposal(2) == [3, 4]


def test_a_longer_match_takes_precedence_over_a_newer_one() -> None:
    tokens = (9, 1, 2, 3, 7, 7, 8, 2, 3, 5, 9, 1, 2, 3)

    assert index_of(tokens).proposal(1) == [7]


def test_the_newest_of_equally_long_matches_is_used() -> None:
    assert index_of((1, 2, 3, 1, 2, 4, 1, 2)).proposal(1) == [4]


def test_matches_are_limited_to_the_longest_ngram() -> None:
    tokens = (9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2)

    assert index_of(tokens, max_ngram=2).proposal(1) == [4]
    assert index_of(tokens, max_ngram=3).proposal(1) == [3]


def test_a_repeating_text_is_continued_periodically() -> None:
    assert index_of((5, 1, 2, 1, 2)).proposal(6) == [1, 2, 1, 2, 1, 2]
    assert index_of((7, 7, 7)).proposal(4) == [7, 7, 7, 7]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3))
def test_the_index_equals_a_linear_search(tokens: list[int], min_ngram: int, more: int) -> None:
    index = NgramIndex(min_ngram, min_ngram + more)
    for place, token in enumerate(tokens):
        index.extend([token])
        expected = looked_through(tokens[: place + 1], min_ngram, min_ngram + more)
        assert index.proposal(3) == expected


def looked_through(tokens: Sequence[int], min_ngram: int, max_ngram: int) -> list[int]:
    """Return the proposal of a linear search over the newest positions."""
    total = len(tokens)
    newest_first = [
        end
        for end in range(total - 1, min_ngram - 1, -1)
        if tokens[end - min_ngram : end] == tokens[total - min_ngram :]
    ][:MAX_CANDIDATES]
    best, best_length = None, 0
    for end in newest_first:
        length = 0
        while (
            length < min(max_ngram, end) and tokens[end - length - 1] == tokens[total - length - 1]
        ):
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None:
        return []
    known = [*tokens]
    for place in range(3):
        known.append(known[best + place])
    return known[total:]
