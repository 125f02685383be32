"""Rewriting of JSON schemas before compilation: the meaning is preserved."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import llguidance
import pytest

from baton.core.errors import InvalidRequest
from baton.core.structured_outputs import MAX_CHARACTERS, StructuredOutputs
from baton.engine.structured_output.llguidance_backend import validate_grammar
from baton.engine.structured_output.schemas.rewrite import KNOWN_FORMATS, prepare_schema
from baton.engine.structured_output.schemas.work import TooMuchWork, Work


def kind(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **more}, "required": ["kind"]}


def only(*names: str) -> dict[str, Any]:
    properties = {name: {"type": "string"} for name in names}
    return {
        "type": "object",
        "properties": properties,
        "required": list(names),
        "additionalProperties": False,
    }


NULL = {"type": "null"}
LINK = {"$ref": "#/$defs/link"}
DEFS = {"$defs": {"link": kind("link", next={"anyOf": [{"$ref": "#/$defs/link"}, NULL]})}}
EXCLUSIVE: dict[str, dict[str, Any]] = {
    "types": {"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]},
    "values": {"oneOf": [{"const": 1}, {"const": True}, {"enum": ["1", 1.5]}, {"enum": [[1]]}]},
    "a value and a type": {"oneOf": [{"const": "a"}, {"type": "number"}]},
    "a fraction": {"oneOf": [{"type": "integer"}, {"enum": [1.5]}]},
    "a discriminator": {"oneOf": [kind("a"), kind("b"), NULL]},
    "a discriminator next to it": {
        "type": "object",
        "required": ["kind"],
        "oneOf": [{"properties": {"kind": {"enum": [one]}}} for one in ("a", "b")],
    },
    "a reference": {**DEFS, "oneOf": [LINK, kind("other"), NULL]},
    "a reference to several": {
        "$defs": {"some": {"oneOf": [kind("a"), kind("b")]}},
        "oneOf": [{"$ref": "#/$defs/some"}, kind("c")],
    },
    "all of several": {"oneOf": [{"allOf": [LINK, {}]}, {"type": "array"}], **DEFS},
    "inside a property": {
        "oneOf": [
            {"type": "object", "properties": {"in": kind(one)}, "required": ["in"]} for one in "ab"
        ]
    },
    "next to anyOf": {"anyOf": [{"type": "string"}, NULL], "oneOf": [{"const": "a"}, NULL]},
    "one": {"oneOf": [{"type": "string"}]},
}
OVERLAPPING: dict[str, dict[str, Any]] = {
    "types": {"oneOf": [{"type": "number"}, {"type": "integer"}]},
    "values": {"oneOf": [{"enum": [1, 2]}, {"const": 1.0}]},
    "what is no object": {"oneOf": [{"required": ["a"], "properties": {"a": NULL}}, only("b"), {}]},
    "a discriminator that is not required": {
        "type": "object",
        "oneOf": [{"properties": {"kind": {"const": one}}} for one in "ab"],
    },
    "patterns": {"type": "string", "oneOf": [{"pattern": "^a+$"}, {"pattern": "^b+$"}]},
    "a pattern of names": {"oneOf": [only("a"), {**only(), "patternProperties": {"a": {}}}]},
    "const that draft 4 does not know": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "oneOf": [{"type": "integer", "const": 1}, {"type": "integer", "const": 2}],
    },
    "a reference elsewhere": {
        "$defs": {"a": {"$id": "http://example.com/a", "$ref": "#/$defs/b", "$defs": {"b": {}}}},
        "oneOf": [{"$ref": "#/$defs/a"}, NULL],
    },
    "a reference to itself": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "oneOf": [LINK, NULL]},
}


@pytest.mark.parametrize("schema", EXCLUSIVE.values(), ids=EXCLUSIVE.keys())
def test_one_of_with_disjoint_branches_becomes_any_of(schema: dict[str, Any]) -> None:
    assert "oneOf" not in prepare_schema(schema, Work())

    validate_grammar(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize("schema", OVERLAPPING.values(), ids=OVERLAPPING.keys())
def test_one_of_with_overlapping_branches_is_refused_by_name(schema: dict[str, Any]) -> None:
    assert "oneOf" in prepare_schema(schema, Work())

    with pytest.raises(InvalidRequest, match=r"oneOf is supported only if|\$ref|http://"):
        validate_grammar(StructuredOutputs(json=json.dumps(schema)))


def test_branches_of_a_one_of_that_stays_are_not_narrowed() -> None:
    """llguidance would find them exclusive, although both allow {"x": 1, "p": ""}."""
    tags = [kind(name, p={"type": "string"}) for name in ("a", "b")]
    tagged = {"discriminator": {"propertyName": "kind"}, "oneOf": tags}
    for each, needed in zip(tags, ("p", "q"), strict=True):
        each["required"] = [needed]
    schema = {"oneOf": [only("x", "p"), tagged]}

    with pytest.raises(InvalidRequest, match="oneOf is supported only if"):
        validate_grammar(StructuredOutputs(json=json.dumps(schema)))


def test_an_unknown_format_is_an_annotation() -> None:
    schema = {
        "$defs": {"format": {"type": "string", "format": "uri-reference", "maxLength": 3}},
        "type": "object",
        "properties": {"format": {"type": "string", "format": "date"}},
        "default": {"format": "other"},
        "components": {"a": {"items": [{"format": "path"}]}},
    }

    assert prepare_schema(schema, Work()) == {
        **schema,
        "$defs": {"format": {"type": "string", "maxLength": 3}},
        "components": {"a": {"items": [{}]}},
    }
    validate_grammar(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_enforced_formats_are_those_of_the_library(name: str) -> None:
    schema = {"type": "string", "format": name, "x-guidance": {"lenient": False}}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    assert llguidance.LLMatcher.validate_grammar(grammar, None) == ""


@pytest.mark.parametrize(
    "given", [{"maxItems": 1}, {"type": ["string", "null"]}, {"uniqueItems": False}]
)
def test_redundant_unique_items_are_removed(given: dict[str, Any]) -> None:
    assert "uniqueItems" not in prepare_schema({"uniqueItems": True, **given}, Work())


def test_a_schema_of_200_kib_is_accepted() -> None:
    names = [f"property_{number:05d}_{'x' * 70}" for number in range(2000)]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    text = json.dumps(schema)
    assert 200_000 < len(text) < MAX_CHARACTERS["json"]

    validate_grammar(StructuredOutputs(json=text))


def test_disjointness_proofs_terminate_for_adversarial_schemas() -> None:
    names = [f"d{number}" for number in range(200)]
    ways = {
        name: {"oneOf": [{"$ref": f"#/$defs/{after}"}, {"$ref": f"#/$defs/{after}"}, NULL]}
        for name, after in pairwise(names)
    }
    schema = {"$defs": {**ways, names[-1]: {"type": "string"}}, "$ref": "#/$defs/d0"}

    with pytest.raises(TooMuchWork):
        prepare_schema(schema, Work())
