"""Token index: its matches equal those of a linear search, also after tokens were dropped."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.spec_decode.suffix_proposer import LONG_MATCH, MAX_CANDIDATES, TokenIndex

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=30), max_size=6)


def index_of(tokens: Sequence[int], *, min_match: int = 2, max_match: int = 4) -> TokenIndex:
    index = TokenIndex(min_match, max_match)
    index.extend(tokens)
    return index


def found(index: TokenIndex, newest: Sequence[int]) -> list[tuple[int, int]]:
    return [(match.end, match.length) for match in index.matches(newest)]


def test_the_newest_place_is_the_first_match() -> None:
    index = index_of((9, 1, 2, 3, 1, 2, 4))

    assert found(index, (1, 2)) == [(6, 2), (3, 2)]
    assert [index.token_at(match.end) for match in index.matches((1, 2))] == [4, 3]


def test_a_place_that_no_token_follows_yet_is_no_match() -> None:
    assert found(index_of((1, 2, 3, 1, 2)), (1, 2)) == [(2, 2)]


def test_a_match_has_at_most_the_longest_length() -> None:
    index = index_of((1, 2, 3, 4, 5, 6))

    assert found(index, (1, 2, 3, 4, 5)) == [(5, 4)]


def test_a_long_match_is_found_behind_many_short_ones() -> None:
    long = tuple(range(10, 10 + LONG_MATCH))
    short = (*long[-2:], 7) * (2 * MAX_CANDIDATES)
    index = index_of((*long, 8, *short), max_match=LONG_MATCH)

    [match] = index.matches(long)

    assert index.token_at(match.end) == 8


def test_dropped_tokens_are_no_part_of_matches() -> None:
    index = index_of((1, 2, 3, 1, 2, 4, 1, 2, 5))

    index.drop(4)

    assert found(index, (1, 2)) == [(8, 2)]
    assert index.token_at(8) == 5
    assert index.num_tokens == 9
    index.drop(5)
    assert index.is_empty


@given(TEXTS, st.integers(1, 3), st.integers(0, 8), st.integers(0, 3), st.data())
def test_the_index_equals_a_linear_search(
    parts: list[list[int]], min_match: int, more: int, num_dropped: int, data: st.DataObject
) -> None:
    max_match = min_match + more
    index, tokens, first = TokenIndex(min_match, max_match), [], 0
    for number, part in enumerate(parts):
        index.extend(part)
        tokens += part
        if number < num_dropped:
            num_tokens = data.draw(st.integers(0, len(tokens) - first))
            index.drop(num_tokens)
            first += num_tokens
        newest = tokens[-max_match:] if first < len(tokens) else [0] * max_match
        assert found(index, newest) == searched(tokens, first, newest, min_match, max_match)


def searched(
    tokens: Sequence[int], first: int, newest: Sequence[int], min_match: int, max_match: int
) -> list[tuple[int, int]]:
    """Return the matches of a linear search over the newest positions."""
    for size in (LONG_MATCH, min_match):
        if size <= max_match and min_match <= size <= len(newest):
            ends = [
                end
                for end in range(len(tokens) - 1, first + size - 1, -1)
                if list(tokens[end - size : end]) == list(newest[-size:])
            ]
            if ends:
                return [
                    (end, common(tokens[first:end], newest, max_match))
                    for end in ends[:MAX_CANDIDATES]
                ]
    return []


def common(before: Sequence[int], newest: Sequence[int], max_match: int) -> int:
    """Return the length of the common end of two sequences."""
    length = 0
    while length < min(max_match, len(before), len(newest)):
        if before[-1 - length] != newest[-1 - length]:
            break
        length += 1
    return length
