"""Places of an answer where a JSON schema requires unique items. Pure.

A place is the set of all subschemas that can apply to the value there, alternatives included. If
one of them has `uniqueItems`, items are unique, although another alternative may allow repetitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from baton.engine.structured_output.schemas.subschemas import (
    changes_base,
    list_objects,
    list_subschemas,
    read_list,
    resolve_pointer,
)

IN_PLACE = ("allOf", "anyOf", "oneOf")  # keywords whose schemas apply to the same value
OF_MEMBERS = ("additionalProperties", "unevaluatedProperties")
OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains")
ITEM_LISTS = ("prefixItems", "items")


def unique_arrays(root: Any) -> SchemaPlace | None:
    """Return the place of the whole answer, or None if no items have to be kept unique."""
    needs_it = any(
        part.get("uniqueItems") is True and not is_unique_anyway(part)
        for part in list_subschemas(root)
    )
    return SchemaPlace((root,), root) if needs_it and can_find_arrays(root) else None


def can_find_arrays(root: Any) -> bool:
    """Return whether all references are understood."""
    for part in list_objects(root):
        if part is not root and changes_base(part):
            return False
        if {"$dynamicRef", "$recursiveRef"} & part.keys():
            return False
        ref = part.get("$ref")
        if isinstance(ref, str) and not isinstance(resolve_pointer(root, ref), dict | bool):
            return False
    return True


class SchemaPlace:
    """Subschemas that can apply to a value."""

    def __init__(self, schemas: Iterable[Any], root: Any) -> None:
        self._root = root
        self._schemas = list(_all_in_place(schemas, root))
        self._members: dict[str, SchemaPlace] = {}
        self._items: dict[int, SchemaPlace] = {}

    @cached_property
    def is_unique(self) -> bool:
        return any(schema.get("uniqueItems") is True for schema in self._schemas)

    def member(self, name: str) -> SchemaPlace:
        """Return the place of a property."""
        if name not in self._members:
            self._members[name] = SchemaPlace(self._member_schemas(name), self._root)
        return self._members[name]

    def item(self, index: int) -> SchemaPlace:
        index = min(index, self._num_prefixes)
        if index not in self._items:
            self._items[index] = SchemaPlace(self._item_schemas(index), self._root)
        return self._items[index]

    @cached_property
    def _num_prefixes(self) -> int:
        lists = (read_list(each, name) for each in self._schemas for name in ITEM_LISTS)
        return max(map(len, lists), default=0)

    def _member_schemas(self, name: str) -> Iterator[Any]:
        for schema in self._schemas:
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                yield properties[name]
            else:
                yield from (schema.get(keyword) for keyword in OF_MEMBERS)
            patterns = schema.get("patternProperties")
            if isinstance(patterns, Mapping):
                yield from patterns.values()

    def _item_schemas(self, index: int) -> Iterator[Any]:
        for schema in self._schemas:
            yield from (schema.get(keyword) for keyword in OF_ITEMS)
            for name in ITEM_LISTS:
                yield from read_list(schema, name)[index : index + 1]


def _all_in_place(schemas: Iterable[Any], root: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas and those that they apply to the same value, each once."""
    seen: set[int] = set()
    pending = list(schemas)
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        yield schema
        if isinstance(schema.get("$ref"), str):
            pending.append(resolve_pointer(root, schema["$ref"]))
        for name in IN_PLACE:
            pending += read_list(schema, name)


def is_unique_anyway(part: Mapping[str, Any]) -> bool:
    max_items, types = part.get("maxItems"), part.get("type")
    is_short = isinstance(max_items, int | float) and max_items <= 1
    names = types if isinstance(types, list) else [types]
    is_no_array = all(isinstance(name, str) and name != "array" for name in names)
    return part["uniqueItems"] is False or is_short or is_no_array
