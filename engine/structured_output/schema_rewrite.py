"""Equivalent rewriting of JSON schemas into the subset that llguidance supports. Pure.

- A `format` that llguidance does not support is removed: by the standard, it is an annotation.
- `oneOf` becomes `anyOf` if no value can match two of its branches.
- `uniqueItems` is removed if no list can contain an item twice.
"""

from __future__ import annotations

from typing import Any

from baton.engine.structured_output.disjoint_schemas import Disjointness
from baton.engine.structured_output.subschemas import read_list, rewrite_subschemas

KNOWN_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    }
)


def prepare_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the rewritten schema. llguidance rejects the keywords that remain unsupported."""
    disjointness = Disjointness(schema)

    def change(part: dict[str, Any]) -> dict[str, Any]:
        name = part.get("format")
        if isinstance(name, str) and name not in KNOWN_FORMATS:
            del part["format"]
        if _is_unique_anyway(part):
            del part["uniqueItems"]
        return _without_one_of(part, disjointness)

    ready: dict[str, Any] = rewrite_subschemas(schema, change)
    return ready


def _is_unique_anyway(part: dict[str, Any]) -> bool:
    if "uniqueItems" not in part:
        return False
    max_items = part.get("maxItems")
    is_short = isinstance(max_items, int | float) and max_items <= 1
    return part["uniqueItems"] is False or is_short or _excludes_lists(part.get("type"))


def _excludes_lists(types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    return all(isinstance(name, str) and name != "array" for name in names)


def _without_one_of(part: dict[str, Any], disjointness: Disjointness) -> dict[str, Any]:
    branches = read_list(part, "oneOf")
    if not branches:
        return part
    rest = {name: value for name, value in part.items() if name != "oneOf"}
    # Older drafts ignore keywords next to a reference.
    also = True if "$ref" in rest else rest
    if not disjointness.at_most_one_matches(branches, also):
        return part
    if "anyOf" not in rest:
        return {**rest, "anyOf": branches}
    return {**rest, "allOf": [*read_list(rest, "allOf"), {"anyOf": branches}]}
