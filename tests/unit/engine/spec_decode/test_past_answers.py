"""Past answers: bounded, the oldest dropped first, and never seen under another salt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.core.ids import PrefixKeys
from baton.engine.spec_decode.suffix_proposer import (
    MAX_CANDIDATES,
    MAX_PAST_TOKENS_OF_ANSWER,
    SEPARATOR,
    PastAnswers,
)

A, B = PrefixKeys("a"), PrefixKeys("a", adapter="b")
OWNERS = st.sampled_from([A, B, PrefixKeys(), PrefixKeys("b")])
ANSWERS = st.lists(st.tuples(OWNERS, st.lists(st.integers(0, 3), max_size=9)), max_size=20)


def following(past: PastAnswers, owner: PrefixKeys, newest: tuple[int, ...]) -> list[int | None]:
    return [match.source.token_at(match.end) for match in past.matches(owner, newest)]


def test_an_answer_is_found_by_its_owner_alone() -> None:
    past = PastAnswers(2, 8)
    past.add(A, (1, 2, 3))

    assert following(past, A, (1, 2)) == [3]
    assert following(past, B, (1, 2)) == []


def test_a_match_does_not_reach_into_the_answer_before() -> None:
    past = PastAnswers(2, 8)
    past.add(A, (1, 2))
    past.add(A, (3, 4))

    assert following(past, A, (2, 3)) == []
    assert following(past, A, (1, 2)) == [SEPARATOR]


def test_the_oldest_answers_are_dropped_first() -> None:
    past = PastAnswers(2, 8, max_tokens=8)
    past.add(A, (1, 2, 3))
    past.add(B, (1, 2, 4))

    past.add(B, (1, 2, 5))

    assert following(past, A, (1, 2)) == []
    assert following(past, B, (1, 2)) == [5, 4]
    assert past.num_tokens == 8


def test_the_end_of_a_long_answer_is_kept() -> None:
    past = PastAnswers(2, 8)

    past.add(A, range(2 * MAX_PAST_TOKENS_OF_ANSWER))

    assert past.num_tokens == MAX_PAST_TOKENS_OF_ANSWER + 1
    assert following(past, A, (1, 2)) == []


@given(ANSWERS, st.integers(1, 40))
def test_each_owner_finds_its_newest_answers(
    answers: list[tuple[PrefixKeys, list[int]]], max_tokens: int
) -> None:
    past = PastAnswers(1, 4, max_tokens)
    for owner, tokens in answers:
        past.add(owner, tokens)
    kept: list[tuple[PrefixKeys, list[int]]] = []
    for owner, tokens in reversed(answers):
        if sum(len(each) + 1 for _, each in kept) + len(tokens) + 1 > max_tokens:
            break
        kept.append((owner, tokens))

    assert past.num_tokens == sum(len(tokens) + 1 for _, tokens in kept)
    for owner, tokens in kept:
        ended = [*tokens, SEPARATOR]
        followers = [ended[place + 1] for place, token in enumerate(tokens) if token == 0]
        same = sum(each.count(0) for other, each in kept if other == owner)
        if same <= MAX_CANDIDATES:
            for follower in followers:
                assert follower in following(past, owner, (0,))
    for owner in {owner for owner, _ in answers}:
        allowed = [each.count(0) for other, each in kept if other == owner]
        assert len(following(past, owner, (0,))) == min(MAX_CANDIDATES, sum(allowed))
