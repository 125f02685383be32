"""Closing of schemas: it only excludes, it excludes what no schema names, and nothing else."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from baton.router.doors.openai.request.tool_choice import close_objects
from tests.support.schemas import is_valid

Schema = dict[str, Any]

NAMES = ("a", "b", "allOf")
UNNAMED = "x"
LEAVES: list[Schema] = [{"type": "integer"}, {}]


def objects(parts: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    properties = st.dictionaries(st.sampled_from(NAMES), parts, min_size=1)
    required = st.lists(st.sampled_from(NAMES), max_size=1)
    return st.builds(
        lambda own, needed: {"type": "object", "properties": own, "required": needed},
        properties,
        required,
    )


def schemas(*combining: str, refs: bool = False) -> st.SearchStrategy[Schema]:
    """Schemas of objects that apply alone, or together by the keywords `combining`."""

    def extend(parts: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
        alone = objects(st.one_of(st.sampled_from(LEAVES), parts))
        kinds = [alone]
        for name in combining:
            lists = st.lists(parts, min_size=1, max_size=2)
            kinds += [
                st.builds(lambda each, name=name: {name: each}, lists),
                st.builds(lambda own, each, name=name: {**own, name: each}, alone, lists),
            ]
        if refs:
            kinds.append(st.builds(lambda own: {**own, "$ref": "#/$defs/d"}, alone))
            kinds.append(st.just({"$ref": "#/$defs/d"}))
        return st.one_of(kinds)

    whole = extend(extend(objects(st.sampled_from(LEAVES))))
    if not refs:
        return whole
    of_defs = objects(st.sampled_from(LEAVES))
    return st.builds(lambda root, shared: {**root, "$defs": {"d": shared}}, whole, of_defs)


def values(*names: str) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.just(1), lambda each: st.dictionaries(st.sampled_from(names), each), max_leaves=6
    )


def accepts(schema: Schema, value: Any) -> bool:
    return is_valid(json.dumps(value), schema)


def has_unnamed(value: Any) -> bool:
    return isinstance(value, dict) and (UNNAMED in value or any(map(has_unnamed, value.values())))


@given(schemas("allOf", "anyOf", refs=True), values(*NAMES, UNNAMED))
def test_instances_of_a_closed_schema_are_instances_of_the_original(
    schema: Schema, value: Any
) -> None:
    assert accepts(schema, value) or not accepts(close_objects(schema), value)


@given(schemas("allOf", "anyOf"), values(*NAMES, UNNAMED))
def test_a_closed_schema_accepts_no_additional_top_level_property(
    schema: Schema, value: Any
) -> None:
    is_open = not isinstance(value, dict) or UNNAMED not in value
    assert is_open or not accepts(close_objects(schema), value)


@given(schemas("allOf", refs=True), st.dictionaries(st.sampled_from(NAMES), st.just(1)))
def test_closing_a_schema_keeps_its_own_properties_valid(
    schema: Schema, value: dict[str, int]
) -> None:
    has_all = value.keys() <= names_of(schema, schema)

    assert accepts(close_objects(schema), value) == (has_all and accepts(schema, value))


def names_of(schema: Schema, root: Schema) -> set[str]:
    """Return the names that the schemas of the top object have."""
    names = {*schema.get("properties", ()), *schema.get("required", ())}
    for part in schema.get("allOf", ()):
        names |= names_of(part, root)
    return names | names_of(root["$defs"]["d"], root) if "$ref" in schema else names
