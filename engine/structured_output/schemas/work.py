"""Limit of the work that the schemas of one text take, which llguidance's own limits do not bound.

Compilers merge schemas that apply to the same value: `allOf`, what is next to `$ref`, `anyOf` and
`oneOf`, and for objects the schemas of each property. Merging gives the product of the alternatives
and copies their parts. Patterns are merged by intersection, whose states are a product, too. And
all pairs of `patternProperties` are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.subschemas import (
    CONSTRAINTS,
    list_subschemas,
    read_list,
    resolve_pointer,
)

# Of about 1 µs. JSONSchemaBench's accepted schemas take up to 200,000.
MAX_WORK = 300_000
MERGING_WORK = 10  # of one part
MIN_PATTERN_STATES = 3  # one that may match anywhere in a text has two, and intersections more
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_OWN = CONSTRAINTS - _IN_PLACE
_OF_MEMBERS = ("additionalProperties", "unevaluatedProperties")
_OF_ITEMS = ("items", "additionalItems", "unevaluatedItems", "contains", "prefixItems")
# Keys of sizes next to names of properties: alternatives of the value itself, and of members and
# items without a name of their own; numbers of parts, of patterns of names, and their characters.
_VALUE, _ANY_MEMBER, _ANY_ITEM, _PARTS, _PATTERNS, _CHARACTERS = range(6)
_NUMBERS = (_PARTS, _PATTERNS, _CHARACTERS)

Sizes = Mapping[str | int, int]
Total = Callable[[Iterable[int]], int]


class TooMuchWork(Exception):
    """The schemas of a text take too much work together."""


class Work:
    """Work that is left for the schemas of one text."""

    def __init__(self, limit: int = MAX_WORK) -> None:
        self._left = limit

    def spend(self, amount: int) -> None:
        """Raises TooMuchWork."""
        self._left -= amount
        if self._left < 0:
            raise TooMuchWork

    def spend_on_merging(self, schema: Any) -> None:
        """Spend what merging the parts of a schema takes. Raises TooMuchWork."""
        parts = list(list_subschemas(schema))
        first = _Measure(schema, Work(), {})
        second = _Measure(schema, self, first.known)  # knows sizes for references to themselves
        for measure in (first, second):
            for part in parts:
                measure.sizes(part)


class _Measure:
    def __init__(self, root: Any, work: Work, before: Mapping[int, Sizes]) -> None:
        self._root = root
        self._work = work
        self._before = before
        self.known: dict[int, Sizes] = {}  # by identity: parts live as long as the root

    def sizes(self, schema: Any) -> Sizes:
        if not isinstance(schema, dict):
            return _own_sizes({})
        if id(schema) in self.known:
            return self.known[id(schema)]
        own = _own_sizes(schema)
        self.known[id(schema)] = self._before.get(id(schema), own)  # for a reference to itself
        merged: list[Sizes] = []
        if schema.keys() & _OWN or schema.keys().isdisjoint(_IN_PLACE):
            merged.append({**own, **self._inner(schema)})
        merged += (self.sizes(each) for each in read_list(schema, "allOf"))
        for name in ("anyOf", "oneOf"):
            branches = [self.sizes(each) for each in read_list(schema, name)]
            merged += [self._combine(branches, sum, max)] if branches else []
        if isinstance(schema.get("$ref"), str):
            merged.append(self.sizes(resolve_pointer(self._root, schema["$ref"])))
        self.known[id(schema)] = found = self._combine(merged, prod, sum)
        if len(merged) > 1 or own[_PATTERNS]:
            self._work.spend(_work_of(merged, found))
        return found

    def _inner(self, schema: Mapping[str, Any]) -> dict[str | int, int]:
        """Return the alternatives of properties by name, and of other members and items."""
        properties, by_pattern = schema.get("properties"), schema.get("patternProperties")
        named = properties.items() if isinstance(properties, dict) else ()
        inner: dict[str | int, int] = {name: self._largest([each]) for name, each in named}
        members = [schema.get(name) for name in _OF_MEMBERS]
        members += by_pattern.values() if isinstance(by_pattern, dict) else ()
        items = [each for name in _OF_ITEMS for each in _as_list(schema.get(name))]
        for name, schemas in ((_ANY_MEMBER, members), (_ANY_ITEM, items)):
            if any(isinstance(each, dict) for each in schemas):
                inner[name] = self._largest(schemas)
        return inner

    def _largest(self, schemas: Iterable[Any]) -> int:
        """Return the most parts of all alternatives of a value together, at any depth."""
        found = (self.sizes(each) for each in schemas)
        return max(max(sizes[_VALUE] * sizes[_PARTS], *_of_members(sizes)) for sizes in found)

    def _combine(self, parts: Sequence[Sizes], alternatives: Total, numbers: Total) -> Sizes:
        self._work.spend(sum(map(len, parts)))
        names = {_VALUE, *_NUMBERS, *(name for part in parts for name in part)}
        found: dict[str | int, int] = {}
        for name in names:
            total = numbers if name in _NUMBERS else alternatives
            found[name] = min(total(_sizes_of(name, parts)), MAX_WORK + 1)
        return found


def _sizes_of(name: str | int, parts: Iterable[Sizes]) -> list[int]:
    """Return the alternatives of a member in each of the parts that describe it."""
    default = _ANY_MEMBER if isinstance(name, str) else name
    found = (part.get(name, part.get(default)) for part in parts)
    return [each for each in found if each is not None]


def _of_members(sizes: Sizes) -> list[int]:
    return [0, *(size for name, size in sizes.items() if name not in (_VALUE, *_NUMBERS))]


def _work_of(merged: Sequence[Sizes], found: Sizes) -> int:
    """Return the work of merging parts, and of comparing their patterns of names."""
    of_parts = 0
    if len(merged) > 1:
        joined = {name for name in found if len(_sizes_of(name, merged)) > 1}
        of_members = _of_members({name: found[name] for name in joined})
        of_parts = found[_VALUE] * found[_PARTS] + sum(of_members)
    has_pairs = found[_PATTERNS] > 1
    of_pairs = found[_PATTERNS] ** 2 * found[_CHARACTERS] // 40 if has_pairs else 0
    return MERGING_WORK * of_parts + found[_VALUE] * of_pairs


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _own_sizes(schema: Mapping[str, Any]) -> Sizes:
    pattern, by_pattern = schema.get("pattern"), schema.get("patternProperties")
    names = tuple(by_pattern) if isinstance(by_pattern, dict) else ()
    values = len(read_list(schema, "enum"))
    states = max(len(pattern), MIN_PATTERN_STATES) if isinstance(pattern, str) else 1
    inner = [value for name, value in schema.items() if name in _OWN]
    return {
        _VALUE: max(values, 1) * states,
        _PARTS: 1 + sum(1 for _ in list_subschemas(inner)),
        _PATTERNS: len(names),
        _CHARACTERS: sum(map(len, names)),
    }
