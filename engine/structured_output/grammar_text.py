"""Grammars of requests as text for llguidance. Pure.

What llguidance cannot enforce is refused: an unsupported keyword is an error, never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import FIELD, StructuredOutputs
from baton.engine.structured_output.compiler_errors import (
    PANIC,
    TOO_DEEP,
    TemporaryRefusal,
    reason_of,
)
from baton.engine.structured_output.schemas.ends import check_grammar_ends, check_schema_ends
from baton.engine.structured_output.schemas.patterns import expense_reason
from baton.engine.structured_output.schemas.rewrite import prepare_schema
from baton.engine.structured_output.schemas.unique_arrays import SchemaPlace, unique_arrays
from baton.engine.structured_output.schemas.work import TooMuchWork, Work
from baton.engine.structured_output.tags.structural_tag import parse_structural_tag
from baton.engine.structured_output.tags.tag_grammar import lark_of_structural_tag

ANY_OBJECT = '{"type": "object"}'
# A space, or a newline with indentation, which suffices for any JSON style. With more allowed, a
# weak model generates nothing but whitespace until max_tokens. Deeper levels are indented less.
WHITESPACE = r"( |\n[ \t]{0,16})?"
# Forced tokens are off: computing them never terminates for text that repeats without end, and
# they would allow only the tokenizer's canonical tokenization of a text.
HEADER = '%llguidance {"no_forcing": true}'
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
TOO_MUCH_WORK = (
    "it combines too much: use fewer alternatives, values of enum and patterns in parts of allOf, "
    "next to $ref, anyOf and oneOf, and in patternProperties"
)
NO_SPECIAL_TOKENS: Mapping[str, int] = {}
_TOKENS = re.compile(
    r"""(?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    |(?P<json>%json)
    |(?P<text>"(?:\\.|[^"\\\x00-\x1f\x7f])*"i?|/(?:\\.|[^/\\])+/[imslux]*|<[^<>\s]+>)
    |(?P<number>[+-]?[0-9]+(?:\.(?!\.)[0-9]*)?(?:[eE][+-]?[0-9]+)?)
    |(?P<other>%[a-z]+|->|::|[!?]?[_A-Za-z][\w-]*|@[\w-]+|[:,.(){}\[\]|=+*?]|\r?\n)
    |(?P<costly>[&~])""",
    re.VERBOSE,
)
_REFUSED = re.compile(r"%json|[&~]")
COSTLY = (
    "the operator {} of expressions is not supported, since it can take unlimited time: write one "
    "expression that matches the same"
)
SCHEMA = "a schema in a grammar is not supported: send it as json, or in a structural_tag"


def grammar_text(
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
    text = ANY_OBJECT if params.json is None else params.json
    return f"start: %json {_schema(params, text, Work())}"


def _lark_of_structural_tag(
    params: StructuredOutputs, text: str, special_ids: Mapping[str, int]
) -> str:
    work = Work()

    def schema_of(schema: Any, *, escapes: str = "") -> str:
        return _schema(params, json.dumps(schema), work, escapes)

    try:
        return lark_of_structural_tag(parse_structural_tag(text), schema_of, special_ids)
    except RecursionError:
        raise refusal(params, TOO_DEEP) from None
    except ValueError as error:
        raise refusal(params, str(error)) from error


def _lark_of_grammar(params: StructuredOutputs, text: str) -> str:
    if "%llguidance" in text:
        raise refusal(params, "%llguidance is not allowed: leave it out")
    check_grammar_ends(text)
    lark = _lark_of_gbnf(params, text) if GBNF_RULE.search(text) else text
    reason = reason_to_refuse(lark)
    if reason is not None:
        raise refusal(params, reason)
    return lark


def _lark_of_gbnf(params: StructuredOutputs, text: str) -> str:
    try:
        return gbnf_to_lark(text).removeprefix("%llguidance {}")
    except RecursionError:
        raise refusal(params, TOO_DEEP) from None
    except Exception as error:  # its parser has no exception class of its own
        raise refusal(params, f"it is not GBNF: {error}") from error


def _schema(params: StructuredOutputs, text: str, work: Work, escapes: str = "") -> str:
    """Return the rewritten schema with Baton's llguidance settings, which replace the client's.

    `escapes` are the letters that can follow a backslash in strings, instead of all.
    """
    try:
        schema = _parse_schema(params, text)
        check_schema_ends(schema)
        if schema is False:
            raise refusal(params, "no value matches the schema false")
        reason = expense_reason(schema)
        if reason is not None:
            raise refusal(params, reason)
        fields = {} if schema is True else _rewritten(params, schema, work)
        settings = _json_settings(params, escapes)
        return json.dumps({**fields, "x-guidance": settings}, allow_nan=False)
    except TooMuchWork:
        raise refusal(params, TOO_MUCH_WORK) from None
    except RecursionError:
        raise refusal(params, TOO_DEEP) from None
    except ValueError as error:
        raise refusal(params, f"a number is out of range: {error}") from error


def _rewritten(params: StructuredOutputs, schema: dict[str, Any], work: Work) -> dict[str, Any]:
    are_compared = params.json is not None and unique_arrays(schema) is not None
    fields = prepare_schema(schema, work, are_items_compared=are_compared)
    work.spend_on_merging(fields)
    return fields


def compared_arrays(params: StructuredOutputs) -> SchemaPlace | None:
    """Return where an answer's items are compared, or None if they need not be."""
    return None if params.json is None else unique_arrays(_parse_schema(params, params.json))


def _json_settings(params: StructuredOutputs, escapes: str) -> dict[str, Any]:
    settings = {"lenient": False, "item_separator": ",", "key_separator": ":"}
    if escapes:
        settings["json_allowed_escapes"] = escapes
    if params.disable_any_whitespace:
        return {**settings, "whitespace_flexible": False}
    return {**settings, "whitespace_pattern": WHITESPACE}


def _parse_schema(params: StructuredOutputs, text: str) -> dict[str, Any] | bool:
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise refusal(params, f"it is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        kind = "a list" if isinstance(schema, list) else type(schema).__name__
        raise refusal(params, f"a JSON schema is an object or a boolean; this is {kind}")
    return schema


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def refusal(
    params: StructuredOutputs, text: str, kind: type[InvalidRequest] = InvalidRequest
) -> InvalidRequest:
    """Return the refusal for an error text of llguidance, or a reason; temporary after a panic."""
    # The lines of GBNF differ from those of the Lark grammar that it is converted to.
    has_lines = params.grammar is not None and not GBNF_RULE.search(params.grammar)
    reason = reason_of(text, has_lines=has_lines)
    kind = TemporaryRefusal if text.startswith(PANIC) else kind
    return kind(f"{FIELD}.{params.form} cannot be enforced: {reason}", FIELD)


def reason_to_refuse(text: str) -> str | None:
    """Return the line and what is not supported there: costly operators, and schemas inside.

    Tokens are those of llguidance. What is not one of them is passed on, for its error
    message, only if nothing after it could have been refused.
    """
    end = 0
    while end < len(text):
        begin, found = end, _TOKENS.match(text, end)
        if found is None:
            is_harmless = _REFUSED.search(text, begin) is None
            return None if is_harmless else _at(text, begin, f"{text[begin]!r} is not Lark")
        end = found.end()
        if found["json"]:
            return _at(text, begin, SCHEMA)
        if found["costly"] and not (found["costly"] == "~" and _is_number_next(text, end)):
            return _at(text, begin, COSTLY.format(found["costly"]))
    return None


def _is_number_next(text: str, end: int) -> bool:
    """Return whether `~` is a repetition, such as `"a" ~ 3..5`, rather than a negation."""
    while (found := _TOKENS.match(text, end)) is not None and found["skip"]:
        end = found.end()
    return found is not None and found["number"] is not None


def _at(text: str, end: int, reason: str) -> str:
    line = text.count("\n", 0, end) + 1
    return f"line {line}: {reason}"
