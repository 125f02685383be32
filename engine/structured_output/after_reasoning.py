"""Grammar of an answer whose structured output begins after a reasoning section. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.sampling import ReasoningSection
from baton.engine.structured_output.grammar import Bits, Grammar, Matcher

ALL = -1  # a word of a bitmask
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class AfterReasoning:
    """Implements `Grammar`. EOS tokens are not allowed inside the section."""

    grammar: Grammar
    section: ReasoningSection
    eos_token_ids: Collection[int]

    def matcher(self) -> Matcher:
        return _SectionMatcher(self)


class _SectionMatcher:
    """Implements `Matcher`: passes the tokens after the section on."""

    def __init__(self, grammar: AfterReasoning) -> None:
        self._section, self._eos_token_ids = grammar.section, grammar.eos_token_ids
        self._matcher = grammar.grammar.matcher()
        self._tokens: list[int] = []  # in front of the structured output
        self._num_matched = 0  # tokens of the structured output
        self._is_inside = self._section.begin_token_id is None

    def advance(self, token_ids: Sequence[int]) -> None:
        num_inside = self._advance_section(token_ids)
        rest = token_ids[num_inside:]
        if rest:
            self._matcher.advance(rest)
            self._num_matched += len(rest)

    def try_advance(self, token_id: int) -> bool:
        if self._is_inside and token_id in self._eos_token_ids:
            return False
        if self._advance_section((token_id,)):
            return True
        is_allowed = self._matcher.try_advance(token_id)
        self._num_matched += is_allowed
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        num_matched = min(num_tokens, self._num_matched)
        if num_matched:
            self._matcher.rollback(num_matched)
            self._num_matched -= num_matched
        if num_tokens > num_matched:
            del self._tokens[len(self._tokens) - (num_tokens - num_matched) :]
            self._is_inside = bool(self._tokens) or self._section.begin_token_id is None

    def fill(self, allowed: Bits) -> None:
        if self._is_inside:
            allowed.fill(ALL)
            for token_id in self._eos_token_ids:
                allowed[token_id // WORD_BITS] &= ~_bit(token_id)
            return
        self._matcher.fill(allowed)
        begin = self._section.begin_token_id
        if begin is not None and not self._tokens and not self._num_matched:
            allowed[begin // WORD_BITS] |= _bit(begin)

    def _advance_section(self, token_ids: Sequence[int]) -> int:
        """Advance over the tokens of the section. Returns their number."""
        end = list(self._section.end_token_ids)
        for index, token_id in enumerate(token_ids):
            is_first = not self._tokens and not self._num_matched
            if is_first and token_id == self._section.begin_token_id:
                self._is_inside = True
            if not self._is_inside:
                return index
            self._tokens.append(token_id)
            self._is_inside = self._tokens[-len(end) :] != end
        return len(token_ids)


def _bit(token_id: int) -> np.int32:
    """Return the word that has this token's bit."""
    return np.uint32(1 << token_id % WORD_BITS).view(np.int32)
