"""Keywords that are rewritten: the grammar accepts valid texts and no invalid ones."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import llguidance
import numpy as np
import pytest
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.protocols import Validator

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar import Grammar, Matcher, num_words
from baton.engine.structured_output.llguidance_backend import GrammarLibrary, validate_grammar

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
TAG_B, TAG_X = ({"type": "object", "properties": {"a": {"const": name}}} for name in "bx")
A_AND_B = {"type": "object", "properties": {"a": TEXT, "b": TEXT, "c": NUMBER}}
DAYS = ["mon", "tue", "wed"]
BYTES = llguidance.LLTokenizer("byte")
LIBRARY = GrammarLibrary(SafetensorsFolder(Path()), BYTES.vocab_size, [BYTES.eos_token])
LIBRARY._tokenizer = BYTES


def tagged(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"const": name}}, "required": ["a"]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "either property": {**A_AND_B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "a tag that is not required": {
        "discriminator": {"propertyName": "a"},
        "oneOf": [
            {**A_AND_B, "properties": {"a": {"const": name}, "b": TEXT, "c": NUMBER}, **needs}
            for name, needs in (("ab", {"required": ["a"]}), ("x", {"required": ["a", "c"]}))
        ],
    },
    "a tag of unions of unions": {
        "oneOf": [
            {"oneOf": [tagged("ab"), tagged("x")]},
            {"anyOf": [tagged("b"), {"type": "null"}]},
        ]
    },
    "names of an enum": {"type": "object", "propertyNames": {"enum": ["a", "c"]}},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^[bc]$"}},
    "unique values": {
        "type": "array",
        "items": {"enum": DAYS},
        "uniqueItems": True,
        "minItems": 1,
    },
    "unique lists in any order": {
        "anyOf": [
            {"$ref": "#/$defs/days"},
            {"type": "string", "oneOf": [{"enum": ["a"]}, {"enum": ["b"]}]},
        ],
        "$defs": {"days": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    },
    "a discriminator that is required elsewhere": {
        "type": "object",
        "required": ["a"],
        "allOf": [
            {
                "oneOf": [
                    {"properties": {"a": {"enum": [name]}, "b": {"enum": [f"b{name}"]}}}
                    for name in ("ab", "x", *map(str, range(24)))
                ]
            }
        ],
    },
    "not anything": {**A_AND_B, "properties": {"a": {"not": {}}, "b": TEXT, "c": NUMBER}},
    "next to a reference": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"t": {"id": "#t", "type": "string"}},
        "oneOf": [{"$ref": "#/definitions/t", "maxLength": 1}, {"type": "null"}],
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


def compiled(schema: dict[str, Any]) -> Grammar:
    return LIBRARY.compile(StructuredOutputs(json=json.dumps(schema)))


def validator_of(schema: dict[str, Any]) -> Validator:
    is_old = "dependencies" in schema or "definitions" in schema
    return (Draft7Validator if is_old else Draft202012Validator)(schema)


def allowed_by(matcher: Matcher) -> list[int]:
    bits = np.zeros(num_words(BYTES.vocab_size), dtype=np.int32)
    matcher.fill(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar: Grammar, value: Any) -> bool:
    matcher = grammar.matcher()
    for byte in json.dumps(value, separators=(",", ":")).encode():
        if byte not in allowed_by(matcher):
            return False
        matcher.advance([byte])
    return BYTES.eos_token in allowed_by(matcher)


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_a_grammar_accepts_valid_values_and_no_others(schema: dict[str, Any]) -> None:
    start = compiled(schema)
    validator = validator_of(schema)

    accepted = [value for value in SAMPLES if accepts(start, value)]
    assert accepted == [value for value in SAMPLES if validator.is_valid(value)]
    assert accepted


# Each with whether it matches a quotation mark, a backslash, a line feed and "]".
SETS = {
    r'^[^"]$': (False, True, True, True),
    r"^[^\\]$": (True, False, True, True),
    r"^[^\]\\]$": (True, False, True, False),
    r'^(a|[^"\n])$': (False, True, False, True),
    r"^\P{P}$": (False, False, True, False),
    r"^\W$": (True, True, True, True),
    r"^.$": (True, True, False, True),
    r'^\["$': (False, False, False, False),
}
MARKS = '"\\\n]'


@pytest.mark.parametrize(("pattern", "expected"), SETS.items(), ids=SETS.keys())
def test_sets_of_characters_are_exact(pattern: str, expected: tuple[bool, ...]) -> None:
    text = compiled({"type": "string", "pattern": pattern})
    by_name = {"patternProperties": {pattern: {}}, "additionalProperties": False}
    names = compiled({"type": "object", **by_name})

    assert tuple(accepts(text, mark) for mark in MARKS) == expected
    assert tuple(accepts(names, {mark: 1}) for mark in MARKS) == expected


NARROWED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "a tag that may be absent": (
        {"discriminator": {"propertyName": "a"}, "oneOf": [TAG_B, {**TAG_X, "required": ["c"]}]},
        {"a": "b"},
        {},
    ),
    "a property that another branch requires": (
        {**A_AND_B, "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}]},
        {"a": "x"},
        {"a": "x", "b": "y"},
    ),
}


@pytest.mark.parametrize(("schema", "kept", "lost"), NARROWED.values(), ids=NARROWED.keys())
def test_some_grammars_are_narrower_than_the_schema(
    schema: dict[str, Any], kept: Any, lost: Any
) -> None:
    start = compiled(schema)

    assert accepts(start, kept)
    assert not accepts(start, lost)
    assert Draft202012Validator(schema).is_valid(lost)


NOT_SUPPORTED = "the keywords? {} (is|are) not supported: leave"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({**A_AND_B, "not": {"required": ["a"]}}, NOT_SUPPORTED.format("not")),
    "if": ({"if": {"const": 1}, "then": TEXT}, NOT_SUPPORTED.format("if and then")),
    "else": ({"if": TEXT, "else": NUMBER}, NOT_SUPPORTED.format("else and if")),
    "dependencies": ({"dependencies": {"a": ["b"]}}, NOT_SUPPORTED.format("dependencies")),
    **{
        name: ({**A_AND_B, name: {"a": value}}, NOT_SUPPORTED.format(name))
        for name, value in (("dependentRequired", ["b"]), ("dependentSchemas", {"required": ["b"]}))
    },
    "ranges": ({"oneOf": [{"type": "integer", "minimum": 3}, {"enum": [1, 4]}]}, "use anyOf"),
    "types": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
    "control characters": ({"type": "string", "pattern": r"^[\x00-!]$"}, "begins with U"),
    "everything": ({"not": {}}, "no value matches it"),
    "counted names": ({**A_AND_B, "minProperties": 2}, "minProperties .* leave them out"),
    "names up to a number": ({**A_AND_B, "maxProperties": 1}, "maxProperties .* leave them out"),
    "lengths of names": (
        {"type": "object", "propertyNames": {"maxLength": 3}},
        NOT_SUPPORTED.format("propertyNames"),
    ),
    "names next to properties": (
        {**A_AND_B, "propertyNames": {"enum": ["a"]}},
        NOT_SUPPORTED.format("propertyNames"),
    ),
    "no names": ({"type": "object", "propertyNames": {"enum": []}}, "propertyNames"),
    "a sum of alternatives": (
        {
            "allOf": [
                {"anyOf": [{"required": [f"{clause}{branch}"]} for branch in range(3)]}
                for clause in range(12)
            ]
        },
        "combines too much",
    ),
}


WRONG_FORMS: list[tuple[dict[str, Any], str]] = [
    ({"propertyNames": {"enum": True}}, "propertyNames is not supported"),
    ({"propertyNames": {"pattern": ["a"]}}, "propertyNames is not supported"),
    ({"not": 1}, "not is not supported"),
    ({"discriminator": {"propertyName": 1}, "oneOf": [{}, {}]}, "oneOf is supported only if"),
    ({"oneOf": {}}, "oneOf"),
    ({"oneOf": []}, "oneOf"),
]


@pytest.mark.parametrize(("schema", "reason"), WRONG_FORMS)
def test_keywords_with_values_of_wrong_types_are_refused_by_name(
    schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(json=json.dumps({"type": "object", **schema})))


@pytest.mark.parametrize(("schema", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_other_keywords_are_refused_by_name(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        validate_grammar(StructuredOutputs(json=json.dumps(schema)))


def walk(grammar: Grammar, random: Random) -> bytes | None:
    """Return a random answer, byte by byte, or None if it does not end soon."""
    matcher, written = grammar.matcher(), bytearray()
    for _ in range(150):
        allowed = allowed_by(matcher)
        likely = [index for index in allowed if index in ENDS]
        token_id = random.choice(likely if likely and random.random() < 0.7 else allowed)
        if token_id == BYTES.eos_token:
            return bytes(written)
        matcher.advance([token_id])
        written.append(token_id)
    return None


ENDS = frozenset({*b'"}]', BYTES.eos_token})


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS.keys())
def test_random_answers_that_end_are_valid(schema: dict[str, Any]) -> None:
    start = compiled(schema)
    validator = validator_of(schema)
    random = Random(3)

    answers = [json.loads(text) for text in (walk(start, random) for _ in range(8)) if text]

    assert answers
    assert all(validator.is_valid(answer) for answer in answers)
