"""Proof that no value can match two schemas. Pure and conservative: it can miss disjointness.

Schemas are distinguished by type, by `const` and `enum`, and for objects by a required property
that the other schema excludes or constrains differently. Lengths, ranges and patterns are ignored.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from baton.engine.structured_output.schemas.proof_steps import ProofSteps
from baton.engine.structured_output.schemas.subschemas import (
    changes_base,
    kind_of,
    list_objects,
    read_list,
    resolve_pointer,
)

KINDS = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
KINDS_OF_TYPE = {kind: frozenset({kind}) for kind in KINDS - {"fraction"}}
KINDS_OF_TYPE["number"] = frozenset({"integer", "fraction"})
MAX_ALTERNATIVES = 32  # per schema
MAX_DEPTH = 12  # references and properties
WITHOUT_CONST = ("/draft-03/", "/draft-04/")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Necessary conditions for values of a schema."""

    kinds: frozenset[str] = KINDS
    values: Mapping[Hashable, str] | None = None  # values to kinds; None: any value
    required: frozenset[str] = frozenset()
    properties: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # names to schemas
    closed: tuple[frozenset[str], ...] = ()  # a property must be in each of these sets

    def and_(self, other: _Facts) -> _Facts:
        values = self.values if other.values is None else other.values
        if self.values is not None and other.values is not None:
            values = {each: self.values[each] for each in self.values.keys() & other.values.keys()}
        properties = dict(self.properties)
        for name, schemas in other.properties.items():
            properties[name] = properties.get(name, ()) + schemas
        return _Facts(
            self.kinds & other.kinds,
            values,
            self.required | other.required,
            properties,
            self.closed + other.closed,
        )

    @property
    def possible_kinds(self) -> frozenset[str]:
        return self.kinds if self.values is None else self.kinds & frozenset(self.values.values())

    @property
    def size(self) -> int:
        return len(self.properties) + len(self.values or ()) + len(self.required)

    def allows(self, name: str) -> bool:
        return all(name in names for names in self.closed)


ANY = (_Facts(),)


class _LimitExceeded(Exception):
    """The proof exceeds its limits."""


class Disjointness:
    """Proofs about parts of one schema."""

    def __init__(self, root: Any, steps: ProofSteps | None = None) -> None:
        self._root = root
        self._steps = steps or ProofSteps()
        parts = (part for part in list_objects(root) if part is not root)
        self._follows_refs = not any(map(changes_base, parts))
        self._has_const = not is_old_draft(root)

    def at_most_one_matches(self, schemas: Sequence[Any], also: Any = True) -> bool:
        """Return True if it is proven that no value that matches `also` matches two schemas."""
        try:
            facts = [self._alternatives((also, each), MAX_DEPTH) for each in schemas]
            return all(
                self._exclude(one, other, MAX_DEPTH) for one, other in combinations(facts, 2)
            )
        except (_LimitExceeded, RecursionError):
            return False

    def _exclude(self, some: Sequence[_Facts], others: Sequence[_Facts], depth: int) -> bool:
        both = (self._join_facts(one, other) for one, other in product(some, others))
        return all(self._is_empty(facts, depth) for facts in both)

    def _is_empty(self, facts: _Facts, depth: int) -> bool:
        """Return True if no value meets the conditions."""
        self._spend(1)
        kinds = facts.possible_kinds
        if not kinds:
            return True
        return kinds == {"object"} and any(
            not facts.allows(name) or (depth > 0 and self._is_impossible(facts, name, depth))
            for name in facts.required
        )

    def _is_impossible(self, facts: _Facts, name: str, depth: int) -> bool:
        """Return True if no value of a required property matches all its schemas."""
        schemas = facts.properties.get(name, ())
        alternatives = self._alternatives(schemas, depth - 1)
        return all(self._is_empty(each, depth - 1) for each in alternatives)

    def _alternatives(self, schemas: Sequence[Any], depth: int) -> Sequence[_Facts]:
        """Return conditions of which each value that matches all schemas meets at least one."""
        found: Sequence[_Facts] = ANY
        for schema in schemas:
            found = self._combine(found, self._of_one(schema, depth))
        return found

    def _of_one(self, schema: Any, depth: int) -> Sequence[_Facts]:
        self._spend(1)
        if schema is False:
            return ()
        if not isinstance(schema, dict) or depth <= 0:
            return ANY
        ref = schema.get("$ref")
        if ref is not None:  # older drafts ignore keywords next to it
            return self._of_one(self._resolve(ref), depth - 1)
        found: Sequence[_Facts] = self._alternatives(read_list(schema, "allOf"), depth - 1)
        for name in ("anyOf", "oneOf"):
            branches = read_list(schema, name)
            if branches:
                some = [each for one in branches for each in self._of_one(one, depth - 1)]
                found = self._combine(found, some)
        own = self._own(schema)
        return [self._join_facts(each, own) for each in found]

    def _own(self, schema: Mapping[str, Any]) -> _Facts:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        is_closed = schema.get("additionalProperties") is False
        is_closed = is_closed and not schema.get("patternProperties")
        return _Facts(
            _kinds(schema.get("type")),
            self._values(schema),
            frozenset(name for name in read_list(schema, "required") if isinstance(name, str)),
            {name: (value,) for name, value in properties.items()},
            (frozenset(properties),) if is_closed else (),
        )

    def _values(self, schema: Mapping[str, Any]) -> Mapping[Hashable, str] | None:
        values: dict[Hashable, str] | None = None
        if "enum" in schema:
            listed = read_list(schema, "enum")
            self._spend(len(listed))
            values = {json_key(value): kind_of(value) for value in listed}
        if "const" in schema and self._has_const:
            key = json_key(schema["const"])
            if values is None or key in values:
                return {key: kind_of(schema["const"])}
            return {}
        return values

    def _resolve(self, ref: object) -> Any:
        """Return the schema of a local reference. One that is not understood allows any value."""
        is_followed = self._follows_refs and isinstance(ref, str)
        return resolve_pointer(self._root, str(ref)) if is_followed else True

    def _combine(self, some: Sequence[_Facts], others: Sequence[_Facts]) -> Sequence[_Facts]:
        found = [self._join_facts(one, other) for one, other in product(some, others)]
        if len(found) > MAX_ALTERNATIVES:
            raise _LimitExceeded
        return found

    def _join_facts(self, one: _Facts, other: _Facts) -> _Facts:
        self._spend(1 + one.size + other.size)
        return one.and_(other)

    def _spend(self, steps: int) -> None:
        self._steps.disjointness -= steps
        if self._steps.disjointness < 0:
            raise _LimitExceeded


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


def is_old_draft(root: Any) -> bool:
    """Return whether a schema is of a draft that does not know `const`."""
    draft = root.get("$schema") if isinstance(root, dict) else None
    return isinstance(draft, str) and any(old in draft for old in WITHOUT_CONST)
