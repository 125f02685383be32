"""Grammars compiled by llguidance; the only module that imports it. Compiling is thread-safe.

Constraints that llguidance cannot enforce are rejected: an unsupported keyword is an error, never
ignored.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
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
from baton.engine.structured_output.grammar import Bits, Grammar, num_words
from baton.engine.structured_output.schema_cost import embedded_schemas, expense_reason
from baton.engine.structured_output.schema_ends import check_grammar_ends, check_schema_ends
from baton.engine.structured_output.schema_rewrite import prepare_schema
from baton.engine.structured_output.schema_width import (
    MAX_JOINED_PATTERNS,
    is_too_wide,
    joins_many_patterns,
)
from baton.engine.structured_output.structural_tags import (
    lark_of_structural_tag,
    parse_structural_tag,
)
from baton.engine.structured_output.unique_arrays import Place, unique_arrays
from baton.engine.structured_output.unique_matcher import TokenTexts, UniqueItems

ANY_OBJECT = '{"type": "object"}'
# A space, or a newline with indentation, which suffices for any JSON style. With more allowed, a
# weak model generates nothing but whitespace until max_tokens. Deeper levels are indented less.
WHITESPACE = r"( |\n[ \t]{0,16})?"
# Forced tokens are off: computing them never terminates for text that repeats without end, and
# they would allow only the tokenizer's canonical tokenization of a text.
HEADER = '%llguidance {"no_forcing": true}'
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
TOO_WIDE = (
    "it combines too many alternatives: use fewer anyOf, oneOf, not and dependencies in one object"
)
TOO_MANY_PATTERNS = f"more than {MAX_JOINED_PATTERNS} patterns apply to one string: join them"
MAX_REWRITTEN_CHARACTERS = 1 << 19  # twice that of a client's schema
NO_SPECIAL_TOKENS: Mapping[str, int] = {}
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


def validate_grammar(params: StructuredOutputs) -> Checked:
    """Validate a grammar without a tokenizer. Raises InvalidRequest if every node rejects it.

    Nodes check more.
    """
    with _refuse_panics(params):
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            _definition(params), None, limits=LIMITS
        )
    if is_wrong:
        raise _error(params, messages[0])
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
                tokenizer, _definition(params, self._special_ids), log_level=0, limits=LIMITS
            )
        grammar = CompiledGrammar(params, matcher, self._eos_token_ids)
        # The first mask is often the most expensive, and shows whether any output fits.
        grammar.matcher().fill(np.zeros(num_words(self._vocab_size), dtype=np.int32))
        _check_cost(params, began_s, MAX_COMPILE_S)
        unique = _unique_arrays(params)
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
                    raise InvalidRequest(
                        f"{FIELD} cannot be enforced: this model's tokenizer does not support "
                        f"grammars: {error}",
                        FIELD,
                    ) from error
            return self._tokenizer


def _special_ids_in(described: str) -> dict[str, int]:
    """Return the special tokens of a tokenizer.json, which grammars do not match as text."""
    added = json.loads(described).get("added_tokens") or ()
    return {token["content"]: token["id"] for token in added if token.get("special")}


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
            raise _error(params, start.get_error())

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
            raise _error(self._wanted, "no token can come next")
        _check_cost(self._wanted, began_s, MAX_MASK_S)

    def _matcher_error(self) -> InvalidRequest:
        return _error(self._wanted, self._matcher.get_error())


@contextmanager
def _refuse_panics(params: StructuredOutputs) -> Iterator[None]:
    """Convert panics of llguidance into InvalidRequest, so that only the request fails."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # from Rust; not an Exception
            raise _error(params, PANIC) from error
        raise


def _definition(
    params: StructuredOutputs, special_ids: Mapping[str, int] = NO_SPECIAL_TOKENS
) -> str:
    """Return the grammar in llguidance's format. Raises InvalidRequest."""
    return llguidance.LLMatcher.grammar_from_lark(f"{HEADER}\n{_lark(params, special_ids)}")


def _lark(params: StructuredOutputs, special_ids: Mapping[str, int]) -> str:
    if params.choice:
        return f"start: {' | '.join(map(json.dumps, params.choice))}"
    if params.regex is not None:
        parsed = json.loads(llguidance.LLMatcher.grammar_from_regex(params.regex))
        return str(parsed["grammars"][0]["lark_grammar"])
    if params.grammar is not None:
        return _lark_of_grammar(params, params.grammar)
    if params.structural_tag is not None:
        return _lark_of_structural_tag(params, params.structural_tag, special_ids)
    return f"start: %json {_schema(params, ANY_OBJECT if params.json is None else params.json)}"


def _lark_of_structural_tag(
    params: StructuredOutputs, text: str, special_ids: Mapping[str, int]
) -> str:
    try:
        tag = parse_structural_tag(text)
        return lark_of_structural_tag(
            tag, lambda schema: _schema(params, json.dumps(schema)), special_ids
        )
    except RecursionError:
        raise _error(params, TOO_DEEP) from None
    except ValueError as error:
        raise _error(params, str(error)) from error


def _lark_of_grammar(params: StructuredOutputs, text: str) -> str:
    if "%llguidance" in text:
        raise _error(params, "%llguidance is not allowed: leave it out")
    check_grammar_ends(text)
    try:
        for schema in embedded_schemas(text):
            _check_schema_cost(params, schema)
    except RecursionError:
        raise _error(params, TOO_DEEP) from None
    if not GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text).removeprefix("%llguidance {}")
    except RecursionError:
        raise _error(params, TOO_DEEP) from None
    except Exception as error:  # its parser has no exception class of its own
        raise _error(params, f"it is not GBNF: {error}") from error


def _schema(params: StructuredOutputs, text: str) -> str:
    """Return the rewritten schema with Baton's llguidance settings, which replace the client's."""
    try:
        schema = _parse_schema(params, text)
        check_schema_ends(schema)
        _check_schema_cost(params, schema)
        if schema is False:
            raise _error(params, "no value matches the schema false")
        if joins_many_patterns(schema):
            raise _error(params, TOO_MANY_PATTERNS)
        fields = {} if schema is True else _rewritten(params, schema)
        ready = json.dumps({**fields, "x-guidance": _json_settings(params)}, allow_nan=False)
        if len(ready) > MAX_REWRITTEN_CHARACTERS:
            raise _error(params, TOO_WIDE)
        return ready
    except RecursionError:
        raise _error(params, TOO_DEEP) from None
    except ValueError as error:
        raise _error(params, f"a number is out of range: {error}") from error


def _rewritten(params: StructuredOutputs, schema: dict[str, Any]) -> dict[str, Any]:
    are_compared = params.json is not None and unique_arrays(schema) is not None
    fields = prepare_schema(schema, are_items_compared=are_compared)
    if is_too_wide(fields):
        # llguidance can prove more branches of oneOf disjoint, since it merges allOf before.
        fields = prepare_schema(schema, are_items_compared=are_compared, splits_one_of=False)
        if is_too_wide(fields):
            raise _error(params, TOO_WIDE)
    return fields


def _unique_arrays(params: StructuredOutputs) -> Place | None:
    """Return where an answer's items are compared, or None if they need not be."""
    return None if params.json is None else unique_arrays(_parse_schema(params, params.json))


def _json_settings(params: StructuredOutputs) -> dict[str, Any]:
    settings = {"lenient": False, "item_separator": ",", "key_separator": ":"}
    if params.disable_any_whitespace:
        return {**settings, "whitespace_flexible": False}
    return {**settings, "whitespace_pattern": WHITESPACE}


def _parse_schema(params: StructuredOutputs, text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _error(params, f"it is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        kind = "a list" if isinstance(schema, list) else type(schema).__name__
        raise _error(params, f"a JSON schema is an object or a boolean; this is {kind}")
    return schema


def _check_schema_cost(params: StructuredOutputs, schema: Any) -> None:
    reason = expense_reason(schema)
    if reason is not None:
        raise _error(params, reason)


def _check_cost(params: StructuredOutputs, began_s: float, max_s: float) -> None:
    took_s = thread_time() - began_s
    if took_s > max_s:
        raise _error(params, f"one step took {took_s:.1f} s of CPU time; make it simpler")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _error(params: StructuredOutputs, text: str) -> InvalidRequest:
    # The lines of GBNF differ from those of the Lark grammar that it is converted to.
    has_lines = params.grammar is not None and not GBNF_RULE.search(params.grammar)
    reason = reason_of(text, has_lines=has_lines)
    return InvalidRequest(f"{FIELD}.{params.form} cannot be enforced: {reason}", FIELD)
