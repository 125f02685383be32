"""Grammars by llguidance: the one module that knows it. Any thread may compile.

What it cannot keep an answer to, it refuses: a keyword that it does not know how to enforce is
an error, never left out.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from time import thread_time
from types import TracebackType
from typing import Any, NoReturn

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.errors import InvalidRequest
from engine.grammar import Bits
from engine.grammars.costly import schemas_in, why_costly
from engine.grammars.endless import check_grammar_ends, check_schema_ends
from engine.grammars.prepared import prepared
from engine.structured_outputs import FIELD, StructuredOutputs

ANY_OBJECT = '{"type": "object"}'
# A space, or a new line with its indentation: as much as anybody's JSON needs. With more allowed,
# a weak model writes nothing else until its tokens are over.
WHITESPACE = r"( |\n[ \t]{0,64})?"
MOST_REASON_CHARACTERS = 400
TOO_DEEP = "it is nested too deeply"
PANIC = "panic:"  # how llguidance tells of one that it caught
BITS_PER_WORD = 32
# Looking ahead for what must be written in any case never ends where it goes on without end, and it
# would let a text be written in the tokenizer's own way alone.
HEADER = '%llguidance {"no_forcing": true}'
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
# Of processor time: no other thread's work counts. Nothing in earnest comes near.
MOST_TO_COMPILE_S = 3.0
MOST_TO_LOOK_S = 0.5
# How much work and memory one grammar may cost: see docs/adr/0025.
LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)


class GrammarChecks:
    """For those who want to know whether nodes would take it, and have no tokenizer."""

    def compile(self, wanted: StructuredOutputs) -> Checked:
        """Raises InvalidRequest for what no node would take. Nodes find out more."""
        with _Panics(wanted):
            is_wrong, told = llguidance.LLMatcher.validate_grammar_with_warnings(
                _definition(wanted), None, limits=LIMITS
            )
        if is_wrong:
            raise _refusal(wanted, told[0])
        return Checked()


class Checked:
    """Nothing is known against it."""


class GrammarLibrary:
    """Compiles for one model's vocabulary. The tokenizer is read when it is first needed.

    On threads with deep stacks: what is far down in a long chain of rules is reached by recursion.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._reading = threading.Lock()

    def compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        """Raises InvalidRequest, with the reason. Takes up to seconds, without the GIL."""
        tokenizer = self._read_tokenizer()
        began_s = thread_time()
        with _Panics(wanted):
            matcher = llguidance.LLMatcher(
                tokenizer, _definition(wanted), log_level=0, limits=LIMITS
            )
        grammar = CompiledGrammar(wanted, matcher)
        # The first look is often the most expensive, and tells whether anything fits at all.
        grammar.matcher().fill(np.zeros(num_words(self._vocab_size), dtype=np.int32))
        _check_cost(wanted, began_s, MOST_TO_COMPILE_S)
        return grammar

    def _read_tokenizer(self) -> llguidance.LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                try:
                    self._tokenizer = llguidance.LLTokenizer(
                        self._path.read_text(encoding="utf-8"),
                        n_vocab=self._vocab_size,
                        eos_token=self._eos_token_ids,
                    )
                except (OSError, ValueError) as error:
                    raise InvalidRequest(
                        f"{FIELD} cannot be kept to here: of this model's tokenizer no grammar "
                        f"can be made: {error}",
                        FIELD,
                    ) from error
            return self._tokenizer


class CompiledGrammar:
    """Its matchers share what they find out about it, so that each knows it sooner."""

    def __init__(self, wanted: StructuredOutputs, start: llguidance.LLMatcher) -> None:
        self._wanted = wanted
        self._start = start
        if start.is_error():
            raise _refusal(wanted, start.get_error())

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._wanted, self._start.deep_copy())


class GrammarMatcher:
    def __init__(self, wanted: StructuredOutputs, matcher: llguidance.LLMatcher) -> None:
        self._wanted = wanted
        self._matcher = matcher

    def advance(self, token_ids: Sequence[int]) -> None:
        with _Panics(self._wanted):
            is_taken = self._matcher.consume_tokens(list(token_ids))
        if not is_taken:
            raise self._trouble()

    def fill(self, allowed: Bits) -> None:
        began_s = thread_time()
        with _Panics(self._wanted):
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        if self._matcher.is_error():
            raise self._trouble()
        if not allowed.any():
            raise _refusal(self._wanted, "no token can come next")
        _check_cost(self._wanted, began_s, MOST_TO_LOOK_S)

    def _trouble(self) -> InvalidRequest:
        return _refusal(self._wanted, self._matcher.get_error())


class _Panics:
    """What llguidance comes to grief on is refused: it is somebody's form, and nobody's engine."""

    def __init__(self, wanted: StructuredOutputs) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and kind.__name__ == "PanicException":  # Rust's; no Exception
            raise _refusal(self._wanted, PANIC) from error


def num_words(vocab_size: int) -> int:
    """How long a mask is."""
    return -(-vocab_size // BITS_PER_WORD)


def _definition(wanted: StructuredOutputs) -> str:
    """In llguidance's own form. Raises InvalidRequest."""
    return llguidance.LLMatcher.grammar_from_lark(f"{HEADER}\n{_lark(wanted)}")


def _lark(wanted: StructuredOutputs) -> str:
    if wanted.choice:
        return f"start: {' | '.join(map(json.dumps, wanted.choice))}"
    if wanted.regex is not None:
        made = json.loads(llguidance.LLMatcher.grammar_from_regex(wanted.regex))
        return str(made["grammars"][0]["lark_grammar"])
    if wanted.grammar is not None:
        return _lark_of_grammar(wanted, wanted.grammar)
    return f"start: %json {_schema(wanted, ANY_OBJECT if wanted.json is None else wanted.json)}"


def _lark_of_grammar(wanted: StructuredOutputs, text: str) -> str:
    if "%llguidance" in text:
        raise _refusal(wanted, "%llguidance is not for clients to say: leave it out")
    check_grammar_ends(text)
    try:
        for schema in schemas_in(text):
            _check_schema_cost(wanted, schema)
    except RecursionError:
        raise _refusal(wanted, TOO_DEEP) from None
    if not GBNF_RULE.search(text):
        return text
    try:
        return gbnf_to_lark(text).removeprefix("%llguidance {}")
    except Exception as error:  # its parser raises whatever it comes to
        raise _refusal(wanted, f"it is no GBNF: {error}") from error


def _schema(wanted: StructuredOutputs, text: str) -> str:
    """As it was asked for, with our settings instead of any that came with it."""
    try:
        schema = _parsed(wanted, text)
        check_schema_ends(schema)
        _check_schema_cost(wanted, schema)
        if schema is False:
            raise _refusal(wanted, "nothing fits the schema false")
        fields = {} if schema is True else prepared(schema)
        return json.dumps({**fields, "x-guidance": _json_settings(wanted)}, allow_nan=False)
    except RecursionError:
        raise _refusal(wanted, TOO_DEEP) from None
    except ValueError as error:
        raise _refusal(wanted, f"a number is out of range: {error}") from error


def _json_settings(wanted: StructuredOutputs) -> dict[str, Any]:
    settings = {"lenient": False, "item_separator": ",", "key_separator": ":"}
    if wanted.disable_any_whitespace:
        return {**settings, "whitespace_flexible": False}
    return {**settings, "whitespace_pattern": WHITESPACE}


def _parsed(wanted: StructuredOutputs, text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise _refusal(wanted, f"it is no JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        kind = "a list" if isinstance(schema, list) else type(schema).__name__
        raise _refusal(wanted, f"a JSON schema is an object or a boolean; this is {kind}")
    return schema


def _check_schema_cost(wanted: StructuredOutputs, schema: Any) -> None:
    reason = why_costly(schema)
    if reason is not None:
        raise _refusal(wanted, reason)


def _check_cost(wanted: StructuredOutputs, began_s: float, most_s: float) -> None:
    took_s = thread_time() - began_s
    if took_s > most_s:
        raise _refusal(wanted, f"a step of it took {took_s:.1f} s; make it simpler")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _refusal(wanted: StructuredOutputs, reason: str) -> InvalidRequest:
    told = " ".join(reason.removesuffix("<non-verbose/>").split())
    if told == "NoExtensionBias":
        told = "no answer can fit it"
    if told.startswith(PANIC):  # with a backtrace behind it
        told = "the library that compiles forms failed on it"
    if len(told) > MOST_REASON_CHARACTERS:
        told = f"{told[:MOST_REASON_CHARACTERS]}…"
    return InvalidRequest(f"{FIELD}.{wanted.form} cannot be kept to: {told}", FIELD)
