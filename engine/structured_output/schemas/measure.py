"""Sizes of the parts of a schema: products or sums over what applies to the same value. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from baton.engine.structured_output.schemas.subschemas import read_list, resolve_pointer

MAX_STEPS = 200_000
MAX_DEPTH = 64
# Keywords of schemas that apply to members with any name, and to items at any index.
_OF_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains", "prefixItems")
ANY_MEMBER, ANY_ITEM = "\0members", "\0items"

Sizes = Mapping[str, int]  # of properties; under the empty name, of the schema itself


@dataclass(frozen=True, slots=True)
class Rules:
    """The size of a part: its own, of parts that must all hold, and of alternatives."""

    own: Callable[[Mapping[str, Any]], int]
    all_of: Callable[[Iterable[int]], int]
    any_of: Callable[[Iterable[int]], int]
    limit: int
    # Patterns count at any depth, and in members and items that have no name.
    is_deep: bool = False


class TooLarge(Exception):
    """The schema takes too long to measure."""


class Measure:
    def __init__(self, root: Any, rules: Rules, before: Mapping[int, Sizes] | None = None) -> None:
        self._root = root
        self._rules = rules
        self._before = before or {}  # sizes for references of a part to itself
        self.known: dict[int, Sizes] = {}  # by identity: parts live as long as the root
        self._steps_left = MAX_STEPS

    def largest(self, schema: Any, depth: int = MAX_DEPTH) -> int:
        """Return the largest size in a part, in which members can have sizes of two kinds."""
        sizes = self.sizes(schema, depth)
        of_any = sizes.get(ANY_MEMBER)
        if of_any is None:
            return max(sizes.values())
        both = (
            self._rules.all_of([size, of_any] if name not in ("", ANY_MEMBER) else [size])
            for name, size in sizes.items()
        )
        return max(both)

    def sizes(self, schema: Any, depth: int = MAX_DEPTH) -> Sizes:
        if not isinstance(schema, dict):
            return {"": self._rules.own({})}
        known = self.known.get(id(schema))
        if known is not None:
            return known
        if depth <= 0:
            raise TooLarge
        own = {"": self._rules.own(schema)}
        self.known[id(schema)] = self._before.get(id(schema), own)  # for a reference to itself
        parts = [own, *(self.sizes(each, depth - 1) for each in read_list(schema, "allOf"))]
        for name in ("anyOf", "oneOf"):
            branches = [self.sizes(each, depth - 1) for each in read_list(schema, name)]
            if branches:
                some = self._combine(branches, self._rules.any_of if self._rules.is_deep else max)
                parts.append({**some, "": self._rules.any_of([each[""] for each in branches])})
        if isinstance(schema.get("$ref"), str):
            parts.append(self.sizes(resolve_pointer(self._root, schema["$ref"]), depth - 1))
        inner = self._inner(schema, depth - 1)
        if inner:
            parts.append({**inner, "": self._rules.all_of([])})
        found = parts[0] if len(parts) == 1 else self._combine(parts, self._rules.all_of)
        self.known[id(schema)] = found
        return found

    def _inner(self, schema: Mapping[str, Any], depth: int) -> dict[str, int]:
        """Return the sizes of properties by name, and of other members and items."""
        properties = schema.get("properties")
        named = properties.items() if isinstance(properties, dict) else ()
        if not self._rules.is_deep:
            return {name: self.sizes(each, depth)[""] for name, each in named}
        inner = {name: self.largest(each, depth) for name, each in named}
        by_pattern = schema.get("patternProperties")
        members = [schema[name] for name in _OF_MEMBERS if name in schema]
        members += by_pattern.values() if isinstance(by_pattern, Mapping) else ()
        items = [
            each
            for name in _OF_ITEMS
            for each in (read_list(schema, name) or [schema.get(name, True)])
        ]
        for name, schemas in ((ANY_MEMBER, members), (ANY_ITEM, items)):
            sizes = [self.largest(each, depth) for each in schemas if isinstance(each, dict)]
            if sizes:
                inner[name] = max(sizes)
        return inner

    def _combine(self, parts: Iterable[Sizes], combined: Callable[[Iterable[int]], int]) -> Sizes:
        by_name: dict[str, list[int]] = {"": []}
        for part in parts:
            self._steps_left -= len(part)
            for name, size in part.items():
                by_name.setdefault(name, []).append(min(size, self._rules.limit + 1))
        if self._steps_left < 0:
            raise TooLarge
        empty = self._rules.all_of([])
        return {name: combined(some) if some else empty for name, some in by_name.items()}
