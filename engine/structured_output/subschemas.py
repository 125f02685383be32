"""Traversal of the subschemas of a JSON schema by keyword. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
