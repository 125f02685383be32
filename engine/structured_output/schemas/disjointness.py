"""Proof that no value can match two schemas. Pure and conservative: it can miss disjointness.

Schemas are distinguished by type, by `const` and `enum`, and for objects by a property that both
require and constrain differently. All other keywords are ignored.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from baton.engine.structured_output.schemas.subschemas import (
    changes_base,
    kind_of,
    list_objects,
    read_list,
    resolve_pointer,
)
from baton.engine.structured_output.schemas.work import Work

KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
KINDS_OF_TYPE = {kind: frozenset({kind}) for kind in KINDS - {"fraction"}}
KINDS_OF_TYPE["number"] = frozenset({"integer", "fraction"})
MAX_DEPTH = 12  # references and properties
JOIN_WORK = 3
WITHOUT_CONST = ("/draft-03/", "/draft-04/")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Necessary conditions for values of a schema."""

    kinds: frozenset[str] = KINDS
    values: Mapping[Hashable, str] | None = None  # values to kinds; None: any value
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # names to schemas

    def and_(self, other: _Facts) -> _Facts:
        properties = dict(self.properties)
        for name, schemas in other.properties.items():
            properties[name] = properties.get(name, ()) + schemas
        return _Facts(
            self.kinds & other.kinds,
            self.common_values(other),
            self.required | other.required,
            properties,
        )

    def common_values(self, other: _Facts) -> Mapping[Hashable, str] | None:
        if self.values is None or other.values is None:
            return self.values if other.values is None else other.values
        return {each: self.values[each] for each in self.values.keys() & other.values.keys()}

    def common_kinds(self, other: _Facts) -> frozenset[str]:
        values = self.common_values(other)
        kinds = self.kinds & other.kinds
        return kinds if values is None else kinds & frozenset(values.values())

    @property
    def size(self) -> int:
        return len(self.properties) + len(self.values or ()) + len(self.required)


ANYTHING = [_Facts()]  # compared by identity


class Disjointness:
    """Proofs about parts of one schema. Raises TooMuchWork."""

    def __init__(self, root: Any, work: Work) -> None:
        self._root = root
        self._work = work
        self._known: dict[tuple[int, ...], Sequence[_Facts]] = {}  # of properties
        parts = (part for part in list_objects(root) if part is not root)
        self._follows_refs = not any(map(changes_base, parts))
        draft = root.get("$schema") if isinstance(root, dict) else None
        self._has_const = not any(old in str(draft) for old in WITHOUT_CONST)

    def at_most_one_matches(self, schemas: Sequence[Any], also: Any = True) -> bool:
        """Return True if it is proven that no value that matches `also` matches two schemas."""
        parts = [self._alternatives((also, each), MAX_DEPTH) for each in schemas]
        return self._exclude(parts, MAX_DEPTH)

    def resolve(self, schema: Any) -> Any:
        """Return the schema that references lead to, or None if they are not understood.

        What is next to them is left out: older drafts ignore it.
        """
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return schema
            is_followed = self._follows_refs and isinstance(schema["$ref"], str)
            schema = resolve_pointer(self._root, schema["$ref"]) if is_followed else None
        return None

    def _exclude(self, parts: Sequence[Sequence[_Facts]], depth: int) -> bool:
        """Return True if no value meets conditions of two parts."""
        return all(
            self._differ(one, other, depth)
            for some, others in combinations(parts, 2)
            for one, other in product(some, others)
        )

    def _differ(self, one: _Facts, other: _Facts, depth: int) -> bool:
        """Return True if no value meets the conditions of both."""
        self._work.spend(1 + min(len(one.values or ()), len(other.values or ())))
        kinds = one.common_kinds(other)
        if not kinds or kinds != {"object"} or depth <= 0:
            return not kinds
        required = one.required | other.required
        return any(
            self._exclude(
                [self._of_property(each, name, depth - 1) for each in (one, other)], depth - 1
            )
            for name in one.properties
            if name in required and name in other.properties
        )

    def _of_property(self, facts: _Facts, name: str, depth: int) -> Sequence[_Facts]:
        schemas = facts.properties[name]
        key = (depth, *map(id, schemas))  # of parts of the root, which live as long
        if key not in self._known:
            self._known[key] = self._alternatives(schemas, depth)
        return self._known[key]

    def _alternatives(self, schemas: Sequence[Any], depth: int) -> Sequence[_Facts]:
        """Return conditions of which each value that matches all schemas meets at least one."""
        found: Sequence[_Facts] = ANYTHING
        for schema in schemas:
            found = self._combine(found, self._of_one(schema, depth))
        return found

    def _of_one(self, schema: Any, depth: int) -> Sequence[_Facts]:
        schema = self.resolve(schema)
        if not isinstance(schema, dict) or depth <= 0:
            return [] if schema is False else ANYTHING
        found = self._combine(
            [self._own(schema)], self._alternatives(read_list(schema, "allOf"), depth - 1)
        )
        for name in ("anyOf", "oneOf"):
            branches = read_list(schema, name)
            if branches:
                some = [each for one in branches for each in self._of_one(one, depth - 1)]
                found = self._combine(found, some)
        return found

    def _own(self, schema: Mapping[str, Any]) -> _Facts:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        return _Facts(
            _kinds(schema.get("type")),
            self._values(schema),
            frozenset(name for name in read_list(schema, "required") if isinstance(name, str)),
            {name: (value,) for name, value in properties.items()},
        )

    def _values(self, schema: Mapping[str, Any]) -> Mapping[Hashable, str] | None:
        listed = [read_list(schema, "enum")] if "enum" in schema else []
        if "const" in schema and self._has_const:
            listed.append([schema["const"]])
        found = [{json_key(value): kind_of(value) for value in values} for values in listed]
        if len(found) == 2:
            return {key: kind for key, kind in found[1].items() if key in found[0]}
        return found[0] if found else None

    def _combine(self, some: Sequence[_Facts], others: Sequence[_Facts]) -> Sequence[_Facts]:
        if some is ANYTHING:
            return others
        if others is ANYTHING:
            return some
        return [self._join(one, other) for one, other in product(some, others)]

    def _join(self, one: _Facts, other: _Facts) -> _Facts:
        self._work.spend(JOIN_WORK + one.size + other.size)
        return one.and_(other)


def _kinds(given: Any) -> frozenset[str]:
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(name, str) and name in KINDS_OF_TYPE for name in names):
        return KINDS
    return frozenset().union(*(KINDS_OF_TYPE[name] for name in names))


def json_key(value: Any) -> Hashable:
    """Return a key that is equal for equal JSON values: 1 equals 1.0, but not true."""
    match value:
        case dict():
            return "object", frozenset((name, json_key(each)) for name, each in value.items())
        case list():
            return "array", tuple(map(json_key, value))
    return kind_of(value), value
