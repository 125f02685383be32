"""Limits of what is compiled, which bound the work before it begins, since nothing can stop it."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar_text import grammar_text
from baton.engine.structured_output.llguidance_backend import validate_grammar
from baton.engine.structured_output.schemas.pattern_size import pattern_size
from baton.engine.structured_output.schemas.proof_steps import MAX_DISJOINTNESS_STEPS, ProofSteps
from baton.engine.structured_output.schemas.rewrite import prepare_schema

MANY = "more than 8 patterns apply to one string"
NEGATED = "more than 16 patterns and negations"
LARGE = "patterns that apply to one string are too large together"
NAMES = "patternProperties has too many patterns"
MERGING = "merging what applies to the same value takes too long"
WIDE = "too many alternatives"
NO_OPERATOR = "the operator {} of expressions is not supported"


def each(number: int, around: Any = lambda schema: schema) -> dict[str, Any]:
    """Return a schema of several patterns that match far apart, each inside of `around`."""
    patterns = [{"pattern": f"(p{index}|.{{9}}){{9}}x"} for index in range(number)]
    return {"allOf": [around(pattern) for pattern in patterns]}


def disjoint_names(number: int) -> dict[str, Any]:
    return {"patternProperties": {f"^name{index:04}$": {} for index in range(number)}}


OVERLAPPING = "|".join(f"[a{first}-p]x{{{repeat}}}" for repeat, first in enumerate("bcdefghijk", 1))
INSIDE: Mapping[str, Any] = {
    "one string": lambda schema: schema,
    "a property": lambda schema: {"properties": {"a": schema}},
    "a deep property": lambda schema: {"properties": {"a": {"properties": {"b": schema}}}},
    "a described name": lambda schema: {"patternProperties": {"^a$": schema}},
    "other names": lambda schema: {"additionalProperties": schema},
    "items of items": lambda schema: {"items": {"items": schema}},
    "first items": lambda schema: {"prefixItems": [schema]},
    "an alternative": lambda schema: {"anyOf": [schema]},
}
UNBOUNDED: dict[str, tuple[Any, str]] = {
    **{f"patterns of {name}": (each(9, around), MANY) for name, around in INSIDE.items()},
    "patterns of a name and of all": (
        {
            "allOf": [
                each(5, lambda schema: {"properties": {"a": schema}}),
                each(4, lambda schema: {"additionalProperties": schema}),
            ]
        },
        MANY,
    ),
    "negated patterns": (
        {"allOf": [{"not": {"pattern": f"^[^{letter}]*$"}} for letter in string.ascii_letters]},
        NEGATED,
    ),
    "alternatives of 8 patterns": ({"allOf": [{"pattern": f"^({OVERLAPPING})$"}] * 8}, LARGE),
    "repetitions of 3 patterns": ({"allOf": [{"pattern": "^(a|bc){40}$"}] * 3}, LARGE),
    "a large pattern next to negations": (
        {
            "allOf": [
                {"pattern": "^(a|bc){60}(?s:.)*$"},
                {"pattern": "^(a|b)[^c]$"},
                *({"not": {"pattern": f"^[^{letter}]*$"}} for letter in "abcdef"),
            ]
        },
        LARGE,
    ),
    "patterns in a cycle": (
        {
            "$defs": {
                "x": {"properties": {"a": {"$ref": "#/$defs/y"}}},
                "y": {"allOf": [{"$ref": "#/$defs/x"}, each(9, INSIDE["a property"])]},
            },
            "$ref": "#/$defs/x",
        },
        MANY,
    ),
    "patterns of names": (disjoint_names(200), NAMES),
    "patterns of names in many places": (
        {
            "$defs": {"names": disjoint_names(30)},
            "properties": {
                f"p{index}": {"allOf": [{"$ref": "#/$defs/names"}, {"required": ["a"]}]}
                for index in range(80)
            },
        },
        NAMES,
    ),
    "values of joined enums": (
        {"allOf": [{"enum": [*range(200)]}, {"enum": [*range(100, 300)]}]},
        MERGING,
    ),
    "a large object next to alternatives": (
        {
            "$defs": {
                "large": {"properties": {f"p{index}": {} for index in range(400)}},
                "any": {"enum": [*range(300)]},
            },
            "properties": {
                f"q{index}": {"allOf": [{"$ref": "#/$defs/large"}, {"$ref": "#/$defs/any"}]}
                for index in range(30)
            },
        },
        MERGING,
    ),
    "branches of oneOf": ({"oneOf": [True] * 401}, WIDE),
}


@pytest.mark.parametrize(("schema", "reason"), UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_a_schema_of_unbounded_cost_is_refused_before_it_is_compiled(
    schema: Any, reason: str
) -> None:
    for params in (
        StructuredOutputs(json=json.dumps(schema)),
        StructuredOutputs(grammar=f"start: %json {json.dumps(schema)}"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            grammar_text(params)


BOUNDED: dict[str, Any] = {
    "rules of passwords": {
        "allOf": [{"pattern": each} for each in ("[a-z]", "[A-Z]", "[0-9]", r"\W", "^.{8,64}$")]
    },
    "patterns of other properties": {
        "allOf": [{"properties": {f"p{index}": {"pattern": "^a{9}$"}}} for index in range(20)]
    },
    "branches of oneOf that overlap": {
        "oneOf": [
            {"enum": [f"v{value}" for value in range(first, first + 5)]} for first in range(9)
        ]
    },
    "a recursive schema": {
        "$defs": {
            "tree": {
                "properties": {
                    "name": {"pattern": "^[a-z]{1,63}$"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                }
            }
        },
        "$ref": "#/$defs/tree",
    },
    "patterns of names": disjoint_names(30),
    "values of an enum in parts": {
        "allOf": [{"enum": [*range(200)]}, {"type": "integer", "minimum": 5}]
    },
    "one large pattern": {"pattern": "^(abc|[d-f]){1,900}$"},
}


@pytest.mark.parametrize("schema", BOUNDED.values(), ids=BOUNDED.keys())
def test_a_schema_of_bounded_cost_is_accepted(schema: Any) -> None:
    validate_grammar(StructuredOutputs(json=json.dumps(schema)))


def test_the_schemas_of_one_text_share_their_proof_steps() -> None:
    """Each of the 256 structures of a tag took as many steps as a single schema may."""
    schema = {"oneOf": [{"const": 1}, {"const": "a"}]}
    full = ProofSteps()
    prepare_schema(schema, full)
    shared = ProofSteps(MAX_DISJOINTNESS_STEPS - full.disjointness, negation=0)

    first, second = (prepare_schema(schema, shared) for _ in range(2))

    assert "anyOf" in first
    assert "oneOf" in second  # no step is left for its proof


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("^abc$", 3),
        ("a|b|cd", 4),
        (r"[a-z\]]\d\p{L}\x{41}", 4),
        ("^[a-z]{1,63}$", 63),
        ("(?:a(bc){2}){3,}", 15),
        ("(?P<name>a)(?i:b)", 2),
        ("a{0}b{,3}", 6),  # the last is text
        (")(a", 1),
        ("((a{999}){999}){999}", 1_000_000),
    ],
)
def test_the_size_of_a_pattern(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size
