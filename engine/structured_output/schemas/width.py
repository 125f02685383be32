"""Products that a compiler gets when it combines the parts of a schema. Pure.

`allOf` of several `anyOf` is compiled by distribution: the product of their branches, which can
take any time and memory. Branches are estimated, for objects also those of each property. `allOf`
of patterns is compiled by intersection, whose states can double with each pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.subschemas import (
    list_subschemas,
    read_list,
    resolve_pointer,
)

MAX_WIDTH = 400
# 20 patterns that may match anywhere in a text took minutes, 10 take 10 ms.
MAX_JOINED_PATTERNS = 8
MAX_STEPS = 200_000
MAX_DEPTH = 64

_Sizes = Mapping[str, int]  # of properties; under the empty name, of the schema itself


@dataclass(frozen=True, slots=True)
class _Rules:
    """The size of a part: its own, of parts that must all hold, and of alternatives."""

    own: Callable[[Mapping[str, Any]], int]
    all_of: Callable[[Iterable[int]], int]
    any_of: Callable[[Iterable[int]], int]
    limit: int
    others: Sequence[str] = ()  # keywords of inner schemas, except properties


_WIDTH = _Rules(lambda _schema: 1, prod, sum, MAX_WIDTH)
_PATTERNS = _Rules(
    lambda schema: int("pattern" in schema),
    sum,
    max,
    MAX_JOINED_PATTERNS,
    ("items", "additionalProperties"),
)


def is_too_wide(schema: Any) -> bool:
    """Return whether some part of a schema has too many alternatives, or is too large to tell."""
    return _exceeds(schema, _WIDTH)


def joins_many_patterns(schema: Any) -> bool:
    """Return whether one string has to match too many patterns, or the schema is too large.

    Takes the schema before it is rewritten: patterns of negations are cheap.
    """
    num_patterns = sum("pattern" in part for part in list_subschemas(schema))
    return num_patterns > MAX_JOINED_PATTERNS and _exceeds(schema, _PATTERNS)


def _exceeds(schema: Any, rules: _Rules) -> bool:
    measure = _Measure(schema, rules)
    try:
        return any(
            size > rules.limit
            for part in list_subschemas(schema)
            for size in measure.sizes(part).values()
        )
    except _TooLarge:
        return True


class _TooLarge(Exception):
    """The schema takes too long to measure."""


class _Measure:
    def __init__(self, root: Any, rules: _Rules) -> None:
        self._root = root
        self._rules = rules
        self._known: dict[int, _Sizes] = {}  # by identity: parts live as long as the root
        self._steps_left = MAX_STEPS

    def sizes(self, schema: Any, depth: int = MAX_DEPTH) -> _Sizes:
        if not isinstance(schema, dict):
            return {"": self._rules.own({})}
        known = self._known.get(id(schema))
        if known is not None:
            return known
        if depth <= 0:
            raise _TooLarge
        own = {"": self._rules.own(schema)}
        self._known[id(schema)] = own  # for a reference to itself
        parts = [own, *(self.sizes(each, depth - 1) for each in read_list(schema, "allOf"))]
        for name in ("anyOf", "oneOf"):
            branches = [self.sizes(each, depth - 1) for each in read_list(schema, name)]
            if branches:
                some = self._combine(branches, max)
                parts.append({**some, "": self._rules.any_of([each[""] for each in branches])})
        if isinstance(schema.get("$ref"), str):
            parts.append(self.sizes(resolve_pointer(self._root, schema["$ref"]), depth - 1))
        inner = {
            name: self.sizes(each, depth - 1)[""] for name, each in self._inner(schema).items()
        }
        if inner:
            parts.append({**inner, "": self._rules.all_of([])})
        found = parts[0] if len(parts) == 1 else self._combine(parts, self._rules.all_of)
        self._known[id(schema)] = found
        return found

    def _inner(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Return the schemas of properties by name, and of other inner values by keyword."""
        properties = schema.get("properties")
        inner = dict(properties) if isinstance(properties, dict) else {}
        return inner | {f"\0{name}": schema[name] for name in self._rules.others if name in schema}

    def _combine(self, parts: Iterable[_Sizes], combined: Callable[[Iterable[int]], int]) -> _Sizes:
        by_name: dict[str, list[int]] = {"": []}
        for part in parts:
            self._steps_left -= len(part)
            for name, size in part.items():
                by_name.setdefault(name, []).append(min(size, self._rules.limit + 1))
        if self._steps_left < 0:
            raise _TooLarge
        empty = self._rules.all_of([])
        return {name: combined(some) if some else empty for name, some in by_name.items()}
