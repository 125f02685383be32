"""Schemas that are proven disjoint have no value in common."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from baton.engine.structured_output.schemas.disjointness import Disjointness
from baton.engine.structured_output.schemas.work import Work

names = st.sampled_from(["a", "b"])
scalars = st.sampled_from([None, True, False, 0, 1, 1.0, 1.5, "", "a", "b"])
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=1) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
types = st.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of few keywords each, since with many no value matches."""
    branches = st.lists(inner, min_size=1, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": types | st.lists(types, min_size=1, max_size=2, unique=True),
        "const": values,
        "enum": st.lists(values, min_size=1, max_size=3),
        "properties": st.dictionaries(names, inner, min_size=1, max_size=2),
        "required": st.lists(names, max_size=2, unique=True),
        "additionalProperties": st.booleans(),
        "patternProperties": st.just({"b": True}),
        "allOf": branches,
        "anyOf": branches,
        "oneOf": branches,
        "$ref": st.sampled_from(["#/$defs/a", "#/$defs/b"]),
    }
    of_objects = {"type": st.just("object"), **{name: keywords[name] for name in OF_OBJECTS}}
    chosen = st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=2, unique=True)
    some = chosen.flatmap(lambda which: st.fixed_dictionaries({n: keywords[n] for n in which}))
    return some | st.fixed_dictionaries(of_objects)


OF_OBJECTS = ("properties", "required", "additionalProperties")
schemas: st.SearchStrategy[Any] = st.recursive(st.just(True), _schemas, max_leaves=6)
objects = _schemas(schemas)


@given(
    objects,
    objects,
    st.just(True) | schemas,
    st.dictionaries(names, objects),
    st.lists(values, min_size=9),
)
def test_schemas_proven_disjoint_are_disjoint(
    one: Any, other: Any, also: Any, definitions: dict[str, Any], candidates: list[Any]
) -> None:
    root = {"$defs": {"a": {"const": "a"}, "b": True, **definitions}, "oneOf": [one, other]}
    if not Disjointness(root, Work()).at_most_one_matches([one, other], also):
        return

    def matches(schema: Any, value: Any) -> bool:
        within = {"$defs": root["$defs"], "allOf": [schema]}
        try:
            return bool(Draft202012Validator(within).is_valid(value))
        except RecursionError:
            return False

    both = [
        value
        for value in candidates
        if matches(also, value) and matches(one, value) and matches(other, value)
    ]
    assert both == []
