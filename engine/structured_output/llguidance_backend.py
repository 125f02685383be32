"""Grammars compiled by llguidance; the only module that imports it. Compiling is thread-safe.

Constraints that llguidance cannot enforce are rejected: an unsupported keyword is an error, never
ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import thread_time
from typing import Any, NoReturn

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.errors import InvalidRequest, ModelError
from baton.core.structured_outputs import FIELD, StructuredOutputs
from baton.engine.structured_output.compiler_errors import PANIC, TOO_DEEP, reason_of
from baton.engine.structured_output.grammar import Bits, num_words
from baton.engine.structured_output.schema_cost import embedded_schemas, expense_reason
from baton.engine.structured_output.schema_ends import check_grammar_ends, check_schema_ends
from baton.engine.structured_output.schema_rewrite import prepare_schema

ANY_OBJECT = '{"type": "object"}'
# A space, or a newline with indentation, which suffices for any JSON style. With more allowed, a
# weak model generates nothing but whitespace until max_tokens. Deeper levels are indented less.
WHITESPACE = r"( |\n[ \t]{0,16})?"
# Forced tokens are off: computing them never terminates for text that repeats without end, and
# they would allow only the tokenizer's canonical tokenization of a text.
HEADER = '%llguidance {"no_forcing": true}'
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# In CPU time of the thread. No realistic grammar comes near these limits.
MAX_COMPILE_S = 3.0
MAX_MASK_S = 0.5
# Limits of work and memory per grammar, see docs/adr/0025.
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


def validate_grammar(wanted: StructuredOutputs) -> Checked:
    """Validate a grammar without a tokenizer. Raises InvalidRequest if every node rejects it.

    Nodes check more.
    """
    with _refuse_panics(wanted):
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            _definition(wanted), None, limits=LIMITS
        )
    if is_wrong:
        raise _error(wanted, messages[0])
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
        self._tokenizer_lock = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Compile a grammar, for up to seconds, without the GIL. Raises InvalidRequest."""
        tokenizer = self._read_tokenizer()
        began_s = thread_time()
        with _refuse_panics(wanted):
            matcher = llguidance.LLMatcher(
                tokenizer, _definition(wanted), log_level=0, limits=LIMITS
            )
        grammar = CompiledGrammar(wanted, matcher)
        # The first mask is often the most expensive, and shows whether any output fits.
        grammar.matcher().fill(np.zeros(num_words(self._vocab_size), dtype=np.int32))
        _check_cost(wanted, began_s, MAX_COMPILE_S)
        return grammar

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._checkpoint.read_tokenizer_json(),
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_token_ids,
                    )
                except (ModelError, ValueError) as error:
                    raise InvalidRequest(
                        f"{FIELD} cannot be enforced: this model's tokenizer does not support "
                        f"grammars: {error}",
                        FIELD,
                    ) from error
            return self._tokenizer


class CompiledGrammar:
    """Compiled grammar. Its matchers share llguidance's caches, so later ones are faster."""

    def __init__(self, wanted: StructuredOutputs, start: llguidance.LLMatcher) -> None:
        self._wanted = wanted
        self._start = start
        if start.is_error():
            raise _error(wanted, start.get_error())

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._wanted, self._start.deep_copy())


class GrammarMatcher:
    def __init__(self, wanted: StructuredOutputs, matcher: llguidance.LLMatcher) -> None:
        self._wanted = wanted
        self._matcher = matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        with _refuse_panics(self._wanted):
            is_taken = self._matcher.consume_tokens(list(token_ids))
        if not is_taken:
            raise self._matcher_error()

    def fill(self, allowed: Bits) -> None:
        began_s = thread_time()
        with _refuse_panics(self._wanted):
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise self._matcher_error()
        if not allowed.any():
            raise _error(self._wanted, "no token can come next")
        _check_cost(self._wanted, began_s, MAX_MASK_S)

    def _matcher_error(self) -> InvalidRequest:
        return _error(self._wanted, self._matcher.get_error())


@contextmanager
def _refuse_panics(wanted: StructuredOutputs) -> Iterator[None]:
    """Convert panics of llguidance into InvalidRequest, so that only the request fails."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # from Rust; not an Exception
            raise _error(wanted, PANIC) from error
        raise


def _definition(wanted: StructuredOutputs) -> str:
    """Return the grammar in llguidance's format. Raises InvalidRequest."""
    return llguidance.LLMatcher.grammar_from_lark(f"{HEADER}\n{_lark(wanted)}")


def _lark(wanted: StructuredOutputs) -> str:
    if wanted.choice:
        return f"start: {' | '.join(map(json.dumps, wanted.choice))}"
    if wanted.regex is not None:
        parsed = json.loads(llguidance.LLMatcher.grammar_from_regex(wanted.regex))
        return str(parsed["grammars"][0]["lark_grammar"])
    if wanted.grammar is not None:
        return _lark_of_grammar(wanted, wanted.grammar)
    return f"start: %json {_schema(wanted, ANY_OBJECT if wanted.json is None else wanted.json)}"


def _lark_of_grammar(wanted: StructuredOutputs, text: str) -> str:
    if "%llguidance" in text:
        raise _error(wanted, "%llguidance is not allowed: leave it out")
    check_grammar_ends(text)
    try:
        for schema in embedded_schemas(text):
            _check_schema_cost(wanted, schema)
    except RecursionError:
        raise _error(wanted, TOO_DEEP) from None
    if not GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text).removeprefix("%llguidance {}")
    except RecursionError:
        raise _error(wanted, TOO_DEEP) from None
    except Exception as error:  # its parser has no exception class of its own
        raise _error(wanted, f"it is not GBNF: {error}") from error


def _schema(wanted: StructuredOutputs, text: str) -> str:
    """Return the rewritten schema with Baton's llguidance settings, which replace the client's."""
    try:
        schema = _parse_schema(wanted, text)
        check_schema_ends(schema)
        _check_schema_cost(wanted, schema)
        if schema is False:
            raise _error(wanted, "no value matches the schema false")
        fields = {} if schema is True else prepare_schema(schema)
        return json.dumps({**fields, "x-guidance": _json_settings(wanted)}, allow_nan=False)
    except RecursionError:
        raise _error(wanted, TOO_DEEP) from None
    except ValueError as error:
        raise _error(wanted, f"a number is out of range: {error}") from error


def _json_settings(wanted: StructuredOutputs) -> dict[str, Any]:
    settings = {"lenient": False, "item_separator": ",", "key_separator": ":"}
    if wanted.disable_any_whitespace:
        return {**settings, "whitespace_flexible": False}
    return {**settings, "whitespace_pattern": WHITESPACE}


def _parse_schema(wanted: StructuredOutputs, text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _error(wanted, f"it is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        kind = "a list" if isinstance(schema, list) else type(schema).__name__
        raise _error(wanted, f"a JSON schema is an object or a boolean; this is {kind}")
    return schema


def _check_schema_cost(wanted: StructuredOutputs, schema: Any) -> None:
    reason = expense_reason(schema)
    if reason is not None:
        raise _error(wanted, reason)


def _check_cost(wanted: StructuredOutputs, began_s: float, max_s: float) -> None:
    took_s = thread_time() - began_s
    if took_s > max_s:
        raise _error(wanted, f"one step took {took_s:.1f} s of CPU time; make it simpler")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _error(wanted: StructuredOutputs, text: str) -> InvalidRequest:
    # The lines of GBNF differ from those of the Lark grammar that it is converted to.
    has_lines = wanted.grammar is not None and not GBNF_RULE.search(wanted.grammar)
    reason = reason_of(text, has_lines=has_lines)
    return InvalidRequest(f"{FIELD}.{wanted.form} cannot be enforced: {reason}", FIELD)
