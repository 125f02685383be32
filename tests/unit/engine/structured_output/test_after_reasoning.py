"""Structured output that begins after a reasoning section."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from baton.core.errors import InvalidRequest
from baton.core.sampling import ReasoningSection
from baton.engine.structured_output.after_reasoning import AfterReasoning
from baton.engine.structured_output.grammar import Bits, Matcher, num_words

VOCAB_SIZE, EOS, BEGIN, END = 70, 69, 31, (32, 33)
LETTERS = range(10)


@dataclass(slots=True)
class Rising:
    """Grammar and matcher of rising tokens below ten, after which EOS is allowed."""

    tokens: list[int] = field(default_factory=list)

    def matcher(self) -> Matcher:
        return Rising()

    def advance(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert token_id in self._allowed()
            self.tokens.append(token_id)

    def try_advance(self, token_id: int) -> bool:
        if token_id == EOS or token_id not in self._allowed():
            return False
        self.advance([token_id])
        return True

    def rollback(self, num_tokens: int) -> None:
        assert 0 < num_tokens <= len(self.tokens)
        del self.tokens[-num_tokens:]

    def fill(self, allowed: Bits) -> None:
        allowed.fill(0)
        for token_id in self._allowed():
            allowed.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def _allowed(self) -> set[int]:
        return {*range(self.tokens[-1] + 1 if self.tokens else 0, 10), EOS}


def a_matcher(begin_token_id: int | None = None) -> Matcher:
    section = ReasoningSection(END, begin_token_id)
    return AfterReasoning(Rising(), section, (EOS,)).matcher()


def allowed_by(matcher: Matcher) -> set[int]:
    bits = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
    matcher.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return set(np.flatnonzero(flags).tolist())


def test_any_text_but_the_end_of_the_answer_is_allowed_in_the_section() -> None:
    matcher = a_matcher()
    matcher.advance([5, 32, 4])  # half of the end does not end it

    assert allowed_by(matcher) == set(range(VOCAB_SIZE)) - {EOS}


def test_structured_output_begins_after_the_section() -> None:
    matcher = a_matcher()
    matcher.advance([9, 9, *END, 3])

    assert allowed_by(matcher) == {*range(4, 10), EOS}


def test_an_answer_without_the_section_is_structured_from_its_first_token() -> None:
    matcher = a_matcher(BEGIN)

    assert allowed_by(matcher) == {*LETTERS, EOS, BEGIN}
    matcher.advance([3])
    assert allowed_by(matcher) == {*range(4, 10), EOS}


def test_the_first_token_can_begin_the_section() -> None:
    matcher = a_matcher(BEGIN)
    matcher.advance([BEGIN, 60])

    assert allowed_by(matcher) == set(range(VOCAB_SIZE)) - {EOS}
    matcher.advance(END)
    assert allowed_by(matcher) == {*LETTERS, EOS}


def test_the_section_does_not_begin_twice() -> None:
    matcher = a_matcher(BEGIN)
    matcher.advance([BEGIN, *END])

    assert not matcher.try_advance(BEGIN)
    assert not matcher.try_advance(EOS)


@pytest.mark.parametrize("begin_token_id", [None, BEGIN])
def test_rollbacks_return_to_the_state_of_the_tokens_before(begin_token_id: int | None) -> None:
    draw = random.Random(4)
    for _ in range(300):
        matcher, tokens = a_matcher(begin_token_id), list[int]()
        for _ in range(12):
            if tokens and draw.random() < 0.4:
                num_tokens = draw.randint(1, len(tokens))
                matcher.rollback(num_tokens)
                del tokens[-num_tokens:]
            else:
                token_id = draw.choice([*LETTERS, BEGIN, *END, *END, EOS])
                is_allowed = token_id in allowed_by(matcher) and token_id != EOS
                assert matcher.try_advance(token_id) == is_allowed
                tokens += [token_id] * is_allowed
            fresh = a_matcher(begin_token_id)
            fresh.advance(tokens)
            assert allowed_by(matcher) == allowed_by(fresh)


@pytest.mark.parametrize("end", [(), tuple(range(17))])
def test_an_end_that_is_empty_or_too_long_is_refused(end: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="1 to 16 tokens"):
        ReasoningSection(end)
