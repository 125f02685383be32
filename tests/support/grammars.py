"""Grammar doubles: one that accepts everything, and a library whose compilation can be blocked."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.checkpoint.tokenizer import Tokenizer
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Bits, Grammar, Matcher, num_words
from tests.support.models import EOS_TOKEN_ID, VOCAB_SIZE

PATIENCE_S = 30.0  # only a hanging test ever waits so long
BAD = StructuredOutputs(regex="bad")
GOOD = StructuredOutputs(regex="good")
SLOW = StructuredOutputs(regex="slow")


class AnyAnswer:
    """Grammar and matcher that accept every token."""

    def matcher(self) -> Matcher:
        return self

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def try_advance(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        pass

    def fill(self, allowed: Bits) -> None:
        allowed.fill(-1)


@dataclass(slots=True)
class HeldLibrary:
    """Grammar library that compiles SLOW when the test releases it and never compiles BAD."""

    slow: frozenset[StructuredOutputs] = frozenset({SLOW})
    bad: frozenset[StructuredOutputs] = frozenset({BAD})
    refusal: type[InvalidRequest] = InvalidRequest
    has_begun: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    compiled: list[StructuredOutputs] = field(default_factory=list)

    def compile(self, wanted: StructuredOutputs) -> AnyAnswer:
        if wanted in self.slow:
            self.has_begun.set()
            if not self.may_end.wait(PATIENCE_S):
                raise TimeoutError("nobody let it end")
        self.compiled.append(wanted)
        if wanted in self.bad:
            raise self.refusal("it is bad", "regex")
        return AnyAnswer()


def is_whole(
    grammar: Grammar, tokenizer: Tokenizer, text: str, vocab_size: int = VOCAB_SIZE
) -> bool:
    """Return whether the grammar accepts the text as a complete answer."""
    matcher = grammar.matcher()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(map(matcher.try_advance, tokens)) and EOS_TOKEN_ID in allowed_by(matcher, vocab_size)


def allowed_by(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    """Return the tokens that are allowed next."""
    bits = np.zeros(num_words(vocab_size), dtype=np.int32)
    matcher.fill(bits)
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(flags).tolist())
