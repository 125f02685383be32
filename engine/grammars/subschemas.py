"""Schemas inside a JSON schema, found by the keyword that holds them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# These hold values, not schemas.
DATA = frozenset({"const", "enum", "default", "example", "examples"})
# These hold schemas by names, and a name may look like a keyword.
BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def rewritten(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return a copy with `change` applied to each schema in it, the innermost first.

    Keywords that are not known may hold schemas, too, since references can point anywhere.
    """
    if isinstance(schema, list):
        return [rewritten(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside: dict[str, Any] = {}
    for name, value in schema.items():
        if name in DATA:
            inside[name] = value
        elif name in BY_NAME and isinstance(value, dict):
            inside[name] = {each: rewritten(value[each], change) for each in value}
        else:
            inside[name] = rewritten(value, change)
    return change(inside)
