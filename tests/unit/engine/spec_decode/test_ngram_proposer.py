"""Draft length of speculation, adapted to the acceptance rate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import RequestId
from baton.engine.spec_decode.config import Speculation, parse_speculation
from baton.engine.spec_decode.ngram_proposer import (
    MAX_PAUSE_STEPS,
    MAX_TOKENS_INDEXED_PER_STEP,
    NgramProposer,
)
from baton.engine.spec_decode.proposer import DraftRow

NAME = RequestId("r")
REPEATING = [1, 2, 3, 4] * 4


def draft(
    proposer: NgramProposer, tokens: Sequence[int] = REPEATING, *, most: int = 8
) -> list[int]:
    row = DraftRow(NAME, np.array(tokens, dtype=np.int64), most)
    return list(proposer.propose([row], most).get(NAME, ()))


def drafted(proposer: NgramProposer, tokens: Sequence[int] = REPEATING, *, most: int = 8) -> int:
    return len(draft(proposer, tokens, most=most))


def test_drafts_have_at_most_the_configured_length() -> None:
    proposer = NgramProposer(Speculation(num_tokens=4))

    assert draft(proposer, most=8) == [1, 2, 3, 4]
    assert draft(proposer, most=2) == [1, 2]


def test_drafts_grow_while_they_are_accepted() -> None:
    proposer = NgramProposer(Speculation(num_tokens=8))
    drafted(proposer)

    lengths = []
    for num_accepted in (1, 2, 3, 4):
        proposer.note_accepted(NAME, 8, num_accepted)
        lengths.append(drafted(proposer))

    assert lengths == [2, 4, 6, 8]


def test_drafts_become_rare_while_none_is_accepted() -> None:
    proposer = NgramProposer(Speculation(num_tokens=8))
    num_guessed = 0

    for _ in range(1000):
        length = drafted(proposer)
        num_guessed += length
        if length:
            proposer.note_accepted(NAME, length, 0)

    assert num_guessed <= 8 + 4 + 1000 // MAX_PAUSE_STEPS + 6


def test_the_first_accepted_draft_ends_the_pauses() -> None:
    proposer = NgramProposer(Speculation(num_tokens=4))
    for _ in range(6):
        while not (length := drafted(proposer)):
            pass
        proposer.note_accepted(NAME, length, 0)
    while not drafted(proposer):
        pass

    proposer.note_accepted(NAME, 1, 1)

    assert drafted(proposer) == 2


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    proposer = NgramProposer(Speculation(num_tokens=4))
    prompt = [1, 2] * MAX_TOKENS_INDEXED_PER_STEP

    assert [drafted(proposer, prompt) for _ in range(3)] == [0, 0, 4]


def test_a_request_that_returns_to_the_batch_is_indexed_again() -> None:
    proposer = NgramProposer(Speculation(num_tokens=4))
    drafted(proposer)

    proposer.forget([NAME, RequestId("never seen")])

    assert draft(proposer, [7, 8, 9, 6, 7, 8, 9], most=1) == [6]


def test_speculation_settings_are_parsed() -> None:
    assert parse_speculation("ngram:5") == Speculation(num_tokens=5)
    assert parse_speculation("") is None
    assert parse_speculation("none") is None


@pytest.mark.parametrize(
    "written", ["ngram", "ngram:", "ngram:0", "ngram:33", "ngram:x", "eagle:3"]
)
def test_malformed_speculation_settings_are_refused(written: str) -> None:
    with pytest.raises(InvalidConfig):
        parse_speculation(written)


def test_ngrams_of_length_zero_are_refused() -> None:
    with pytest.raises(InvalidConfig):
        Speculation(4, min_ngram=0)
    with pytest.raises(InvalidConfig):
        Speculation(4, min_ngram=3, max_ngram=2)
