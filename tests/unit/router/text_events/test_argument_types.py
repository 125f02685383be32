"""Types of arguments by the schemas of tools, whose references can be many and circular."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from baton.router.text_events.formats.argument_types import ANY_TYPE, ArgumentTypes
from tests.support.growth import MAX_RATIO, growth


def types_of(schema: Mapping[str, Any], parameter: str = "x") -> frozenset[str]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return ArgumentTypes([tool]).of("f", parameter)


def circular(num_branches: int) -> dict[str, Any]:
    branches = [{"$ref": "#/$defs/a"}] * num_branches
    return {
        "$defs": {"a": {"anyOf": [*branches, {"type": "integer"}]}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
    }


def test_circular_references_are_followed_once() -> None:
    assert types_of(circular(100)) == {"integer"}


def test_references_of_any_depth_and_alternatives_give_all_types() -> None:
    chain = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(20)}
    ends = {"a20": {"oneOf": [{"const": 1}, {"enum": ["a", None]}, {"type": ["array"]}]}}
    schema = {"$defs": {**chain, **ends}, "properties": {"x": {"$ref": "#/$defs/a0"}}}

    assert types_of(schema) == {"integer", "string", "null", "array"}


def test_a_parameter_of_too_many_schemas_can_have_any_type() -> None:
    branches = [{"type": "integer", "minimum": n} for n in range(1000)]

    assert types_of({"properties": {"x": {"anyOf": branches}}}) == ANY_TYPE


@pytest.mark.parametrize("wrong", [5, "a", {"a": 1}, True])
def test_wrong_schemas_allow_any_type(wrong: object) -> None:
    keywords = ("type", "enum", "$ref", "anyOf", "allOf")
    for schema in (wrong, *({keyword: wrong} for keyword in keywords if wrong != "a")):
        assert types_of({"properties": {"x": schema}}) == ANY_TYPE, schema
        assert types_of({"additionalProperties": schema}) == ANY_TYPE, schema


def test_the_time_for_all_parameters_grows_like_the_schema() -> None:
    """They share one large schema, which is read again for each of them."""

    def read(size: int) -> None:
        shared = {"anyOf": [{"type": "object", "minProperties": n} for n in range(size)]}
        ref = {"$ref": "#/$defs/shared"}
        names = [f"p{n}" for n in range(size)]
        schema = {"properties": dict.fromkeys(names, ref), "$defs": {"shared": shared}}
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        types = ArgumentTypes([tool])
        for name in names:
            types.of("f", name)

    assert growth(read, 250) <= MAX_RATIO
    assert growth(lambda size: types_of(circular(size)), 500) <= MAX_RATIO
