"""Grammars compiled by llguidance. Compiling is thread-safe."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import Any

import llguidance
import numpy as np

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.errors import InvalidRequest, ModelError
from baton.core.structured_outputs import FIELD, StructuredOutputs
from baton.engine.structured_output.compiler_errors import PANIC, TemporaryRefusal
from baton.engine.structured_output.grammar import Bits, Grammar, num_words
from baton.engine.structured_output.grammar_text import (
    NO_SPECIAL_TOKENS,
    compared_arrays,
    grammar_text,
    refusal,
)
from baton.engine.structured_output.unique_matcher import TokenTexts, UniqueItems

# In CPU time of the thread. No realistic grammar comes near these limits.
MAX_COMPILE_S = 2.0
MAX_MASK_S = 0.5
# Limits of work and memory per grammar, see ADR 0025.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class Checked:
    """A grammar that passed validation; it is not compiled."""


def validate_grammar(params: StructuredOutputs) -> Checked:
    """Validate a grammar without a tokenizer. Raises InvalidRequest if every node rejects it.

    Nodes check more.
    """
    with _refuse_panics(params):
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar_text(params), None, limits=LIMITS
        )
    if is_wrong:
        raise refusal(params, messages[0])
    return Checked()


class GrammarLibrary:
    """Compiles grammars for one model's vocabulary. The tokenizer is loaded on first use.

    Needs threads with deep stacks, since llguidance follows long chains of rules by recursion.
    """

    def __init__(
        self, checkpoint: Checkpoint, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._checkpoint = checkpoint
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._special_ids: Mapping[str, int] = NO_SPECIAL_TOKENS
        self._token_texts: TokenTexts | None = None
        self._tokenizer_lock = threading.Lock()

    def compile(self, params: StructuredOutputs) -> Grammar:
        """Compile a grammar, for up to seconds, without the GIL. Raises InvalidRequest."""
        tokenizer = self._read_tokenizer()
        began_s = thread_time()
        with _refuse_panics(params):
            matcher = llguidance.LLMatcher(
                tokenizer, grammar_text(params, self._special_ids), log_level=0, limits=LIMITS
            )
        grammar = CompiledGrammar(params, matcher, self._eos_token_ids)
        # The first mask is often the most expensive, and shows whether any output fits.
        grammar.matcher().fill(np.zeros(num_words(self._vocab_size), dtype=np.int32))
        _check_cost(params, began_s, MAX_COMPILE_S)
        unique = compared_arrays(params)
        if unique is None:
            return grammar
        return UniqueItems(grammar, unique, self._read_token_texts(tokenizer))

    def _read_token_texts(self, tokenizer: llguidance.LLTokenizer) -> TokenTexts:
        with self._tokenizer_lock:
            if self._token_texts is None:
                self._token_texts = TokenTexts(
                    [tokenizer.decode_bytes([token_id]) for token_id in range(self._vocab_size)]
                )
            return self._token_texts

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    described = self._checkpoint.read_tokenizer_json()
                    self._special_ids = _special_ids_in(described)
                    self._tokenizer = llguidance.LLTokenizer(
                        described,
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_token_ids,
                    )
                except (ModelError, ValueError) as error:
                    raise TemporaryRefusal(
                        f"{FIELD} cannot be enforced: this model's tokenizer does not support "
                        f"grammars: {error}",
                        FIELD,
                    ) from error
            return self._tokenizer


def _special_ids_in(described: str) -> dict[str, int]:
    """Return the tokens of a tokenizer.json that grammars do not match as text.

    llguidance counts added tokens of the form `<…>` as special, too.
    """
    added = json.loads(described).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if _is_special(token)}


def _is_special(token: Mapping[str, Any]) -> bool:
    content = token["content"]
    is_tag = content.startswith("<") and content.endswith(">")
    return is_tag or bool(token.get("special"))


class CompiledGrammar:
    """Compiled grammar. Its matchers share llguidance's caches, so later ones are faster."""

    def __init__(
        self,
        params: StructuredOutputs,
        start: llguidance.LLMatcher,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._wanted = params
        self._start = start
        self._eos_token_ids = eos_token_ids
        if start.is_error():
            raise refusal(params, start.get_error())

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._wanted, self._start.deep_copy(), self._eos_token_ids)


class GrammarMatcher:
    """Implements `Matcher`."""

    def __init__(
        self,
        params: StructuredOutputs,
        matcher: llguidance.LLMatcher,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._wanted = params
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def advance(self, token_ids: Sequence[int]) -> None:
        with _refuse_panics(self._wanted):
            is_taken = self._matcher.consume_tokens(list(token_ids))
        if not is_taken:
            raise self._matcher_error()

    def try_advance(self, token_id: int) -> bool:
        if token_id in self._eos_token_ids:
            return False
        with _refuse_panics(self._wanted):
            is_allowed = self._matcher.validate_tokens([token_id]) == 1
            if is_allowed:
                self.advance((token_id,))
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        with _refuse_panics(self._wanted):
            is_done = self._matcher.rollback(num_tokens)
        if not is_done:
            raise self._matcher_error()

    def fill(self, allowed: Bits) -> None:
        began_s = thread_time()
        with _refuse_panics(self._wanted):
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise self._matcher_error()
        if not allowed.any():
            raise refusal(self._wanted, "no token can come next")
        _check_cost(self._wanted, began_s, MAX_MASK_S)

    def _matcher_error(self) -> InvalidRequest:
        return refusal(self._wanted, self._matcher.get_error())


@contextmanager
def _refuse_panics(params: StructuredOutputs) -> Iterator[None]:
    """Convert panics of llguidance into InvalidRequest, so that only the request fails."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # from Rust; not an Exception
            raise refusal(params, PANIC) from error
        raise


def _check_cost(params: StructuredOutputs, began_s: float, max_s: float) -> None:
    took_s = thread_time() - began_s
    if took_s > max_s:
        reason = f"one step took {took_s:.1f} s of CPU time; make it simpler"
        raise refusal(params, reason, TemporaryRefusal)
