"""Products that a compiler gets when it combines the parts of a schema. Pure.

`allOf` of several `anyOf` is compiled by distribution: the product of their branches, which can
take any time and memory. Branches are estimated, for objects also those of each property. `allOf`
of patterns is compiled by intersection, whose states and transitions are products, too, and of
which llguidance counts only the results. Names that patterns describe must differ, which it proves
for each pair of patterns wherever it merges objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.pattern_size import pattern_size
from baton.engine.structured_output.schemas.subschemas import (
    CONSTRAINTS,
    list_subschemas,
    read_list,
    resolve_pointer,
)

MAX_WIDTH = 400
# 20 patterns that may match anywhere in a text took minutes, 10 take 10 ms.
MAX_JOINED_PATTERNS = 8
# Of the sizes of joined patterns: 8 of ten alternatives each took minutes and all memory.
MAX_PATTERN_PRODUCT = 100_000
# Pairs of patterns of names, by their characters: 300 short ones took 4 s.
MAX_NAME_PATTERN_WORK = 20_000_000
MAX_STEPS = 200_000
MAX_DEPTH = 64
# Keywords of schemas that apply to members with any name, and to items at any index.
_OF_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains", "prefixItems")
_ANY_MEMBER, _ANY_ITEM = "\0members", "\0items"

_Sizes = Mapping[str, int]  # of properties; under the empty name, of the schema itself


@dataclass(frozen=True, slots=True)
class _Rules:
    """The size of a part: its own, of parts that must all hold, and of alternatives."""

    own: Callable[[Mapping[str, Any]], int]
    all_of: Callable[[Iterable[int]], int]
    any_of: Callable[[Iterable[int]], int]
    limit: int
    # Patterns count at any depth, and in members and items that have no name.
    is_deep: bool = False


def _pattern_factor(schema: Mapping[str, Any]) -> int:
    pattern = schema.get("pattern")
    return pattern_size(pattern) + 2 if isinstance(pattern, str) else 1


def _name_patterns(schema: Mapping[str, Any]) -> Sequence[str]:
    by_pattern = schema.get("patternProperties")
    return tuple(by_pattern) if isinstance(by_pattern, Mapping) else ()


_WIDTH = _Rules(lambda _schema: 1, prod, sum, MAX_WIDTH)
_PATTERNS = _Rules(
    lambda schema: int("pattern" in schema), sum, max, MAX_JOINED_PATTERNS, is_deep=True
)
_ANY_JOINED = _Rules(_PATTERNS.own, sum, max, 1, is_deep=True)
_PATTERN_PRODUCT = _Rules(_pattern_factor, prod, sum, MAX_PATTERN_PRODUCT, is_deep=True)
_NO_LIMIT = 1 << 40
_NAME_PATTERNS = _Rules(lambda schema: len(_name_patterns(schema)), sum, sum, _NO_LIMIT)
_NAME_CHARACTERS = _Rules(lambda schema: sum(map(len, _name_patterns(schema))), sum, sum, _NO_LIMIT)


def is_too_wide(schema: Any) -> bool:
    """Return whether some part of a schema has too many alternatives, or is too large to tell."""
    return _exceeds(schema, _WIDTH)


def joins_many_patterns(schema: Any) -> bool:
    """Return whether one string has to match too many patterns, or the schema is too large."""
    return _num_patterns(schema) > MAX_JOINED_PATTERNS and _exceeds(schema, _PATTERNS)


def joins_large_patterns(schema: Any) -> bool:
    """Return whether the patterns that one string has to match are too large together.

    Takes the schema before it is rewritten: patterns of negations are large, and cheap.
    """
    joins_any = _num_patterns(schema) > 1 and _exceeds(schema, _ANY_JOINED)
    return joins_any and _exceeds(schema, _PATTERN_PRODUCT)


def _num_patterns(schema: Any) -> int:
    return sum("pattern" in part for part in list_subschemas(schema))


def has_many_name_patterns(schema: Any) -> bool:
    """Return whether proving that the patterns of names differ takes too much work."""
    if sum(len(_name_patterns(part)) for part in list_subschemas(schema)) < 2:
        return False
    numbers, characters = _Measure(schema, _NAME_PATTERNS), _Measure(schema, _NAME_CHARACTERS)
    widths = _Measure(schema, _WIDTH)
    work = 0
    try:
        for part in list_subschemas(schema):
            if _name_patterns(part) or _merges(part):
                number = numbers.sizes(part)[""]
                work += number**2 * characters.sizes(part)[""] * widths.sizes(part)[""]
    except _TooLarge:
        return True
    return work > MAX_NAME_PATTERN_WORK


def _merges(part: Mapping[str, Any]) -> bool:
    """Return whether a part has several schemas that must all hold."""
    num_schemas = len(read_list(part, "allOf")) + len({"anyOf", "oneOf", "$ref"} & part.keys())
    return num_schemas + bool(part.keys() & CONSTRAINTS - {"allOf", "anyOf", "oneOf", "$ref"}) > 1


def _exceeds(schema: Any, rules: _Rules) -> bool:
    measure = _Measure(schema, rules)
    try:
        sizes = [measure.largest(part) for part in list_subschemas(schema)]
        if rules.is_deep:
            # What was measured inside of a reference to itself is too small.
            measure = _Measure(schema, rules, measure.known)
            sizes = [measure.largest(part) for part in list_subschemas(schema)]
    except _TooLarge:
        return True
    return max(sizes, default=0) > rules.limit


class _TooLarge(Exception):
    """The schema takes too long to measure."""


class _Measure:
    def __init__(
        self, root: Any, rules: _Rules, before: Mapping[int, _Sizes] | None = None
    ) -> None:
        self._root = root
        self._rules = rules
        self._before = before or {}  # sizes for references of a part to itself
        self.known: dict[int, _Sizes] = {}  # by identity: parts live as long as the root
        self._steps_left = MAX_STEPS

    def largest(self, schema: Any, depth: int = MAX_DEPTH) -> int:
        """Return the largest size in a part, in which members can have sizes of two kinds."""
        sizes = self.sizes(schema, depth)
        of_any = sizes.get(_ANY_MEMBER)
        if of_any is None:
            return max(sizes.values())
        both = (
            self._rules.all_of([size, of_any] if name not in ("", _ANY_MEMBER) else [size])
            for name, size in sizes.items()
        )
        return max(both)

    def sizes(self, schema: Any, depth: int = MAX_DEPTH) -> _Sizes:
        if not isinstance(schema, dict):
            return {"": self._rules.own({})}
        known = self.known.get(id(schema))
        if known is not None:
            return known
        if depth <= 0:
            raise _TooLarge
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
        for name, schemas in ((_ANY_MEMBER, members), (_ANY_ITEM, items)):
            sizes = [self.largest(each, depth) for each in schemas if isinstance(each, dict)]
            if sizes:
                inner[name] = max(sizes)
        return inner

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
