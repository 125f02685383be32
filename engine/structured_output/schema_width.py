"""Number of alternatives that a compiler gets when it combines the parts of a schema. Pure.

`allOf` of several `anyOf` is compiled by distribution: the product of their branches, which can
take any time and memory. Branches are estimated, for objects also those of each property.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from baton.engine.structured_output.subschemas import list_subschemas, read_list, resolve_pointer

MAX_WIDTH = 400
MAX_STEPS = 200_000
MAX_DEPTH = 64

_Widths = Mapping[str, int]  # of properties; under the empty name, of the schema itself
ONE: _Widths = {"": 1}


def is_too_wide(schema: Any) -> bool:
    """Return whether some part of a schema has too many alternatives, or is too large to tell."""
    measure = _Width(schema)
    try:
        return any(
            width > MAX_WIDTH
            for part in list_subschemas(schema)
            for width in measure.widths(part).values()
        )
    except _TooLarge:
        return True


class _TooLarge(Exception):
    """The schema takes too long to measure."""


class _Width:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, _Widths] = {}  # by identity: parts live as long as the root
        self._steps_left = MAX_STEPS

    def widths(self, schema: Any, depth: int = MAX_DEPTH) -> _Widths:
        if not isinstance(schema, dict):
            return ONE
        known = self._known.get(id(schema))
        if known is not None:
            return known
        if depth <= 0:
            raise _TooLarge
        self._known[id(schema)] = ONE  # for a reference to itself
        parts = [self.widths(each, depth - 1) for each in read_list(schema, "allOf")]
        for name in ("anyOf", "oneOf"):
            branches = [self.widths(each, depth - 1) for each in read_list(schema, name)]
            if branches:
                some = self._combine(branches, max)
                parts.append({**some, "": sum(each[""] for each in branches)})
        if isinstance(schema.get("$ref"), str):
            parts.append(self.widths(resolve_pointer(self._root, schema["$ref"]), depth - 1))
        properties = schema.get("properties")
        if isinstance(properties, dict):
            own = {name: self.widths(each, depth - 1)[""] for name, each in properties.items()}
            parts.append({**own, "": 1})
        found = parts[0] if len(parts) == 1 else self._combine(parts, prod)
        self._known[id(schema)] = found
        return found

    def _combine(
        self, parts: Iterable[_Widths], combined: Callable[[Iterable[int]], int]
    ) -> _Widths:
        by_name: dict[str, list[int]] = {"": []}
        for part in parts:
            self._steps_left -= len(part)
            for name, width in part.items():
                by_name.setdefault(name, []).append(min(width, MAX_WIDTH + 1))
        if self._steps_left < 0:
            raise _TooLarge
        return {name: combined(some) if some else 1 for name, some in by_name.items()}
