"""Reasons of refusals: llguidance's own texts, options and positions do not reach clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler_errors import reason_of
from baton.engine.structured_output.llguidance_backend import validate_grammar

# Words of llguidance and of the text that Baton generates for it.
INTERNALS = (
    *("llguidance", "no_forcing", "x-guidance", "%json", "coerce_one_of", "Unimplemented", "f64"),
    *("retriever", "Regex is empty", "regex parse error", "failed to compile", "2(8)"),
)
REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "not": (
        {"json": {"not": {"pattern": "a.b"}}},
        "the keyword not is not supported: leave it out, or describe",
    ),
    "several": (
        {"json": {"if": {"format": "a"}, "then": {}, "not": {"pattern": "a.b"}}},
        "the keywords if, not and then are not supported: leave them out",
    ),
    "oneOf": ({"json": {"oneOf": [{"pattern": "a.b"}, {"minLength": 3}]}}, "use anyOf"),
    "elsewhere": ({"json": {"$ref": "http://a/b"}}, "http://a/b is not fetched: put that schema"),
    "nowhere": ({"json": {"$ref": "#/a"}}, "$ref names #/a, which does not exist"),
    "no number": ({"json": {"type": "integer", "minimum": "a"}}, "a number for 'minimum'"),
    "nothing": ({"json": {"type": "string", "const": 1}}, "no value matches it"),
    "no text": (
        {"json": {"type": "string", "format": "date", "pattern": "a"}},
        "no text matches its pattern, format and lengths together",
    ),
    "pattern": (
        {"json": {"type": "string", "pattern": "(?=a)b"}},
        "its regular expression cannot be used: look-around",
    ),
    "word boundary": (
        {"json": {"type": "string", "pattern": r"\bfoo"}},
        "its regular expression cannot be used: word boundaries",
    ),
    "number of properties": (
        {"json": {"type": "object", "properties": {"a": {}}, "minProperties": 2}},
        "minProperties and maxProperties are supported only if",
    ),
    "deep": (
        {"json": json.loads('{"items":' * 400 + "{}" + "}" * 400)},
        "it is nested too deeply",
    ),
    "regex": ({"regex": "(a"}, "its regular expression cannot be used: unclosed group"),
    "grammar": ({"grammar": 'start: a\na: "a" b'}, 'line 2, column 4: unknown name: "b"'),
    "schema in a grammar": (
        {"grammar": 'start: a\na: %json {"not": {"pattern": "a.b"}}'},
        "line 2: a schema in a grammar is not supported: send it as json",
    ),
    "GBNF": ({"grammar": "root ::= a"}, "it is not GBNF: Rule 'a' not found"),
}


@pytest.mark.parametrize(("wanted", "reason"), REASONS.values(), ids=REASONS.keys())
def test_a_refusal_names_the_cause_in_the_clients_text_and_the_remedy(
    wanted: dict[str, Any], reason: str
) -> None:
    fields: dict[str, Any] = {
        name: json.dumps(value) if name == "json" else value for name, value in wanted.items()
    }

    with pytest.raises(InvalidRequest) as refusal:
        validate_grammar(StructuredOutputs(**fields))

    assert reason in str(refusal.value)
    assert [word for word in INTERNALS if word in str(refusal.value)] == []


@pytest.mark.parametrize(
    "text",
    [
        '{"oneOf": [{"const": 1e999}, {"type": "string"}]}',
        '{"type": "integer", "not": {"enum": [1e999]}}',
        '{"type": "string", "not": {"maxLength": 1e999}}',
    ],
)
def test_numbers_beyond_doubles_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"out of range|is not supported"):
        validate_grammar(StructuredOutputs(json=text))


@pytest.mark.parametrize(
    "text",
    [
        (
            "Parser Error: Current row has 10807 items; max is 2000; consider making it flat\n"
            "<non-verbose/>"
        ),
        "lexer error: too many expressions constructed\n<non-verbose/>",
        "initial lexer configuration (grammar) too big (limit for this grammar: 500000)",
    ],
)
def test_an_exceeded_compiler_limit_states_the_remedy(text: str) -> None:
    assert reason_of(text) == "it exceeds the compiler's limits: make it simpler"


def test_client_text_is_not_mistaken_for_an_exceeded_limit() -> None:
    with pytest.raises(InvalidRequest, match='unknown name: "fuel"'):
        validate_grammar(StructuredOutputs(grammar="start: fuel"))
