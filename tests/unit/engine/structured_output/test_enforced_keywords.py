"""Keywords that are rewritten: the grammar accepts valid texts and no invalid ones."""

from __future__ import annotations

import json
from itertools import permutations
from random import Random
from typing import Any

import llguidance
import pytest
from jsonschema import Draft7Validator, Draft202012Validator

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.llguidance_backend import LIMITS, _definition, validate_grammar

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
A_AND_B = {"type": "object", "properties": {"a": TEXT, "b": TEXT, "c": NUMBER}}
DAYS = ["mon", "tue", "wed"]
BYTES = llguidance.LLTokenizer("byte")

SCHEMAS: dict[str, dict[str, Any]] = {
    "either property": {**A_AND_B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "exactly one range": {"oneOf": [{"type": "integer", "minimum": 3}, {"enum": [1, 4, 5]}]},
    "one of two patterns": {
        "type": "string",
        "oneOf": [{"pattern": "^[a]+$"}, {"pattern": "^[ab]+$"}],
    },
    "not a property": {**A_AND_B, "not": {"required": ["a"]}},
    "not both": {**A_AND_B, "not": {"required": ["a", "b"]}},
    "neither": {**A_AND_B, "not": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}},
    "not a value": {"type": ["string", "null"], "not": {"enum": ["ab", "a", "", None]}},
    "not a number": {"type": "integer", "not": {"enum": [1, 3]}, "minimum": 0, "maximum": 4},
    "not a prefix": {"type": "string", "not": {"pattern": "^(ab|b)"}},
    "not not": {"type": "string", "not": {"not": {"enum": ["ab", "b"]}}},
    "not a reference": {"$defs": {"t": TEXT}, "not": {"$ref": "#/$defs/t"}, "maxItems": 1},
    "not a oneOf that is narrowed": {
        **A_AND_B,
        "not": {"properties": {"a": {"not": {"enum": ["ab"]}}}},
    },
    "if and then": {
        **A_AND_B,
        "if": {"properties": {"a": {"const": "ab"}}, "required": ["a"]},
        "then": {"required": ["b"]},
    },
    "if and else": {
        **A_AND_B,
        "if": {"required": ["a"]},
        "then": {"properties": {"b": {"const": "b"}}},
        "else": {"required": ["c"]},
    },
    "dependencies": {**A_AND_B, "dependencies": {"a": ["b"], "c": {"required": ["a"]}}},
    "dependentRequired": {**A_AND_B, "dependentRequired": {"a": ["b", "c"]}},
    "dependentSchemas": {
        **A_AND_B,
        "dependentSchemas": {"a": {"properties": {"b": {"const": "b"}}}},
    },
    "at least one property": {**A_AND_B, "minProperties": 1},
    "at most one property": {**A_AND_B, "maxProperties": 1, "additionalProperties": False},
    "two properties": {**A_AND_B, "minProperties": 2, "maxProperties": 2},
    "one or two": {
        **A_AND_B,
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": False,
    },
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^[bc]$"}},
    "unique values": {
        "type": "array",
        "items": {"enum": DAYS},
        "uniqueItems": True,
        "minItems": 1,
    },
    "unique flags": {"uniqueItems": True, "items": {"type": "boolean"}},
}
OBJECTS = [
    dict(zip(("a", "b", "c"), values, strict=True))
    for values in [("ab", "b", 1), ("x", "y", 2), ("b", "", 0)]
]
SAMPLES: list[Any] = [
    *({name: each[name] for name in names} for each in OBJECTS for names in
      [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c"), ("a", "b", "c")]),
    *("", "a", "ab", "abc", "b", "ba", "aa", "c", None, True),
    *range(7),
    *([*days] for size in range(4) for days in permutations(DAYS, size)),
    *(["mon", "mon"], [True, False], [False, False], [False]),
]  # fmt: skip


def accepts(start: llguidance.LLMatcher, value: Any) -> bool:
    text = json.dumps(value, separators=(",", ":")).encode()
    matcher = start.deep_copy()
    return matcher.try_consume_tokens(list(text)) == len(text) and bool(matcher.is_accepting())


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_grammar_accepts_valid_values_and_no_others(schema: dict[str, Any]) -> None:
    params = StructuredOutputs(json=json.dumps(schema))
    start = llguidance.LLMatcher(BYTES, _definition(params), log_level=0, limits=LIMITS)
    old = "dependencies" in schema
    validator = (Draft7Validator if old else Draft202012Validator)(schema)

    assert not start.is_error(), start.get_error()
    accepted = [value for value in SAMPLES if accepts(start, value)]
    assert accepted == [value for value in SAMPLES if validator.is_valid(value)]
    assert accepted


NARROWED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "lists of many values": (
        {"type": "array", "items": {"enum": list("abcdef")}, "uniqueItems": True},
        list("acf"),
        list("fca"),
    ),
    "properties without a name": (
        {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "minProperties": 1},
        {"b": "x", "z": 1},
        {"z": 1},
    ),
}


@pytest.mark.parametrize(("schema", "kept", "lost"), NARROWED.values(), ids=NARROWED.keys())
def test_some_grammars_are_narrower_than_the_schema(
    schema: dict[str, Any], kept: Any, lost: Any
) -> None:
    params = StructuredOutputs(json=json.dumps(schema))
    start = llguidance.LLMatcher(BYTES, _definition(params), log_level=0, limits=LIMITS)

    assert accepts(start, kept)
    assert not accepts(start, lost)
    assert Draft202012Validator(schema).is_valid(lost)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a pattern": ({"type": "string", "not": {"pattern": "a.*b"}}, "not"),
    "nothing to forbid": ({"not": {}}, "not"),
    "a draft without const": (
        {"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": 1}},
        "not",
    ),
    "a condition": ({"if": {"format": "date"}, "then": {"type": "string"}}, "if and then"),
    "counted names": ({"properties": {"a": TEXT}, "minProperties": 2}, "minProperties"),
    "lengths of names": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "a sum of alternatives": (
        {
            "allOf": [
                {"anyOf": [{"required": [f"{clause}{branch}"]} for branch in range(3)]}
                for clause in range(12)
            ]
        },
        "too many alternatives",
    ),
}


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_other_keywords_are_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(json=json.dumps(schema)))


def walk(start: llguidance.LLMatcher, random: Random) -> bytes | None:
    """Return a random answer, byte by byte, or None if it does not end soon."""
    matcher, written = start.deep_copy(), bytearray()
    for _ in range(150):
        allowed = [index for index, bias in enumerate(matcher.compute_logit_bias()) if bias]
        likely = [index for index in allowed if index in ENDS]
        token_id = random.choice(likely if likely and random.random() < 0.7 else allowed)
        if token_id == BYTES.eos_token:
            return bytes(written)
        matcher.consume_token(token_id)
        written.append(token_id)
    return None


ENDS = frozenset({*b'"}]', BYTES.eos_token})


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_random_answers_that_end_are_valid(schema: dict[str, Any]) -> None:
    params = StructuredOutputs(json=json.dumps(schema))
    start = llguidance.LLMatcher(BYTES, _definition(params), log_level=0, limits=LIMITS)
    validator = (Draft7Validator if "dependencies" in schema else Draft202012Validator)(schema)
    random = Random(3)

    answers = [json.loads(text) for text in (walk(start, random) for _ in range(8)) if text]

    assert answers
    assert all(validator.is_valid(answer) for answer in answers)
