"""Traversal of the subschemas of a JSON schema by keyword. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# Keywords whose values are data, not schemas.
DATA = frozenset({"const", "enum", "default", "example", "examples"})
# Keywords that map names to schemas. A name can look like a keyword.
BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def rewrite_subschemas(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy of `schema` with `change` applied to each subschema, the innermost first.

    Unknown keywords can contain schemas, too, since references can point anywhere.
    """
    if isinstance(schema, list):
        return [rewrite_subschemas(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copied: dict[str, Any] = {}
    for name, value in schema.items():
        if name in DATA:
            copied[name] = value
        elif name in BY_NAME and isinstance(value, dict):
            copied[name] = {each: rewrite_subschemas(value[each], change) for each in value}
        else:
            copied[name] = rewrite_subschemas(value, change)
    return change(copied)


def list_subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield `schema` and each subschema, the parts that `rewrite_subschemas` changes."""
    if isinstance(schema, list):
        for each in schema:
            yield from list_subschemas(each)
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            yield from list_subschemas(list(value.values()))
        elif name not in DATA:
            yield from list_subschemas(value)


def resolve_pointer(root: Any, ref: str) -> Any:
    """Return the part that a local reference points to, or None if there is none."""
    if not ref.startswith("#"):
        return None
    place = root
    for part in unquote(ref).removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        elif isinstance(place, dict) and name in place:
            place = place[name]
        else:
            return None
    return place if ref == "#" or ref.startswith("#/") else None
