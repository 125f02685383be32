"""Limits of what is compiled, which bound the work before it begins, since nothing can stop it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.grammar_text import grammar_text
from baton.engine.structured_output.llguidance_backend import validate_grammar
from baton.engine.structured_output.schemas.rewrite import prepare_schema
from baton.engine.structured_output.schemas.work import TooMuchWork, Work


def each(number: int, around: Any = lambda schema: schema) -> dict[str, Any]:
    """Return a schema of several patterns that match far apart, each inside of `around`."""
    patterns = [{"pattern": f"(p{index}|.{{9}}){{9}}x"} for index in range(number)]
    return {"allOf": [around(pattern) for pattern in patterns]}


def alternatives(number: int, size: int, branch: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return a schema of several anyOf, each with branches made of names of its own."""
    return {
        "allOf": [
            {"anyOf": [branch(f"{clause}_{index}") for index in range(size)]}
            for clause in range(number)
        ]
    }


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
UNBOUNDED: dict[str, Any] = {
    **{f"patterns of {name}": each(9, around) for name, around in INSIDE.items()},
    "patterns of a name and of all": {
        "allOf": [
            each(5, lambda schema: {"properties": {"a": schema}}),
            each(4, lambda schema: {"additionalProperties": schema}),
        ]
    },
    "alternatives of 8 patterns": {"allOf": [{"pattern": f"^({OVERLAPPING})$"}] * 8},
    "20 short patterns": {"allOf": [{"pattern": letter} for letter in "abcdefghijklmnopqrst"]},
    "patterns in a cycle": {
        "$defs": {
            "x": {"properties": {"a": {"$ref": "#/$defs/y"}}},
            "y": {"allOf": [{"$ref": "#/$defs/x"}, each(9, INSIDE["a property"])]},
        },
        "$ref": "#/$defs/x",
    },
    "patterns of names": disjoint_names(200),
    "patterns of names in many places": {
        "$defs": {"names": disjoint_names(30)},
        "properties": {
            f"p{index}": {"allOf": [{"$ref": "#/$defs/names"}, {"required": ["a"]}]}
            for index in range(80)
        },
    },
    "values of joined enums": {"allOf": [{"enum": [*range(200)]}, {"enum": [*range(100, 300)]}]},
    "values next to a property without a name": {
        "allOf": [{"enum": [*range(200)], "properties": {"": {}}}] * 2
    },
    "a large object next to alternatives": {
        "$defs": {
            "large": {"properties": {f"p{index}": {} for index in range(400)}},
            "any": {"enum": [*range(300)]},
        },
        "properties": {
            f"q{index}": {"allOf": [{"$ref": "#/$defs/large"}, {"$ref": "#/$defs/any"}]}
            for index in range(30)
        },
    },
    "branches of oneOf": {"oneOf": [{"required": [f"p{index}"]} for index in range(401)]},
    "products": alternatives(3, 30, lambda name: {"required": [name]}),
    "products of objects": alternatives(
        2, 50, lambda name: {"properties": {f"{name}{letter}": {} for letter in "abcde"}}
    ),
    "products of a property": {
        "allOf": [
            {"properties": {"a": each}}
            for each in alternatives(2, 200, lambda name: {"required": [name]})["allOf"]
        ]
    },
}


@pytest.mark.parametrize("schema", UNBOUNDED.values(), ids=UNBOUNDED.keys())
def test_a_schema_of_unbounded_cost_is_refused_before_it_is_compiled(schema: Any) -> None:
    tag = {"structures": [{"begin": "<f>", "schema": schema}], "triggers": ["<f>"]}
    for params in (
        StructuredOutputs(json=json.dumps(schema)),
        StructuredOutputs(structural_tag=json.dumps(tag)),
    ):
        with pytest.raises(InvalidRequest, match="it combines too much: use fewer"):
            grammar_text(params)


BOUNDED: dict[str, Any] = {
    "rules of passwords": {
        "allOf": [{"pattern": each} for each in ("[a-z]", "[A-Z]", "[0-9]", r"\W", "^.{8,64}$")]
    },
    "patterns of other properties": {
        "allOf": [{"properties": {f"p{index}": {"pattern": "^a{9}$"}}} for index in range(20)]
    },
    "branches of a tagged union": {
        "oneOf": [
            {
                "properties": {"id": {"type": "string"}, "kind": {"const": index}},
                "required": ["id", "kind"],
                "type": "object",
            }
            for index in range(150)
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


def test_the_schemas_of_one_text_share_their_work() -> None:
    """Each of the 256 structures of a tag took as much as a single schema may."""
    schema = {"oneOf": [{"const": 1}, {"const": "a"}]}
    needed = next(limit for limit in range(99) if is_enough(schema, Work(limit)))
    shared = Work(2 * needed - 1)

    assert is_enough(schema, shared)
    assert not is_enough(schema, shared)


def is_enough(schema: dict[str, Any], work: Work) -> bool:
    try:
        prepare_schema(schema, work)
    except TooMuchWork:
        return False
    return True
