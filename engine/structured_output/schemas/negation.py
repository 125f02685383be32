"""Schemas of values that another schema forbids. Pure.

A negation is narrow: it can leave out values that the schema forbids, and never allows one that
the schema allows. Keywords without a rule here contribute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from baton.engine.structured_output.schemas.disjointness import is_old_draft
from baton.engine.structured_output.schemas.proof_steps import ProofSteps
from baton.engine.structured_output.schemas.string_complement import (
    pattern_of_mismatches,
    pattern_of_others,
)
from baton.engine.structured_output.schemas.subschemas import (
    TYPES,
    changes_base,
    kind_of,
    list_objects,
    resolve_pointer,
)

Schema = dict[str, Any]

MAX_DEPTH = 12  # subschemas and references
MAX_NUMBERS = 16  # of an enum, each of which splits the numbers in two ranges


class NegationLimitExceeded(Exception):
    """The negations of a schema exceed their limit."""


class Negation:
    """Negations of parts of one schema.

    `rewrite` makes a part ready for the compiler, for parts that are negated twice.
    """

    def __init__(self, root: Any, rewrite: Callable[[Any], Any], steps: ProofSteps) -> None:
        self._root = root
        self._rewrite = rewrite
        self._steps = steps
        parts = (part for part in list_objects(root) if part is not root)
        self._follows_refs = not any(map(changes_base, parts))
        self._is_old_draft = is_old_draft(root)
        self._rules: Mapping[str, Callable[[Any, int], Iterator[Schema]]] = {
            "type": self._types,
            "enum": self._enum,
            "const": self._const,
            "pattern": self._pattern,
            "required": self._required,
            "properties": self._properties,
            "items": self._items,
            "not": self._not,
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._any_of,  # narrow: values that match several branches are left out
        }

    def alternatives(self, schema: Any, depth: int = MAX_DEPTH) -> list[Schema]:
        """Return schemas each of which allows only values that `schema` forbids.

        Raises NegationLimitExceeded.
        """
        self._steps.negation -= 1
        if self._steps.negation < 0:
            raise NegationLimitExceeded
        if schema is False:
            return [{}]
        if not isinstance(schema, dict) or depth <= 0:
            return []
        ref = schema.get("$ref")
        if ref is not None:  # older drafts ignore keywords next to it
            if not (self._follows_refs and isinstance(ref, str)):
                return []
            return self.alternatives(resolve_pointer(self._root, ref), depth - 1)
        found: list[Schema] = []
        for name, value in schema.items():
            if name in self._rules:
                found += self._rules[name](value, depth - 1)
            elif name in BOUNDS:
                found += BOUNDS[name](value)
        return found

    def _types(self, given: Any, _depth: int) -> Iterator[Schema]:
        names = given if isinstance(given, list) else [given]
        if all(isinstance(name, str) and name in TYPES for name in names):
            yield from _other_types(names)

    def _const(self, value: Any, depth: int) -> Iterator[Schema]:
        if not self._is_old_draft:  # they ignore it
            yield from self._enum([value], depth)

    def _enum(self, values: Any, _depth: int) -> Iterator[Schema]:
        if not isinstance(values, list):
            return
        by_type: dict[str, list[Any]] = {}
        for value in values:
            by_type.setdefault(_type_of(value), []).append(value)
        yield from _other_types(list(by_type))
        if "string" in by_type:
            pattern = pattern_of_others(set(by_type["string"]))
            if pattern is not None:
                yield {"type": "string", "pattern": pattern}
        others = [each for each in (True, False) if each not in by_type.get("boolean", [each])]
        if others:
            yield {"enum": others}
        numbers = sorted(set(by_type.get("number", ())))
        if 0 < len(numbers) <= MAX_NUMBERS:
            yield {"type": "number", "exclusiveMaximum": numbers[0]}
            for low, high in zip(numbers, [*numbers[1:], None], strict=True):
                end = {} if high is None else {"exclusiveMaximum": high}
                yield {"type": "number", "exclusiveMinimum": low, **end}

    def _pattern(self, pattern: Any, _depth: int) -> Iterator[Schema]:
        others = pattern_of_mismatches(pattern) if isinstance(pattern, str) else None
        if others is not None:
            yield {"type": "string", "pattern": others}

    def _required(self, names: Any, _depth: int) -> Iterator[Schema]:
        for name in names if isinstance(names, list) else ():
            if isinstance(name, str):
                yield {"type": "object", "properties": {name: False}}

    def _properties(self, properties: Any, depth: int) -> Iterator[Schema]:
        for name, schema in properties.items() if isinstance(properties, dict) else ():
            value = any_of(self.alternatives(schema, depth))
            if value is not None:
                yield {"type": "object", "properties": {name: value}, "required": [name]}

    def _items(self, schema: Any, depth: int) -> Iterator[Schema]:
        """Narrow: all items are forbidden ones, though one would suffice."""
        item = any_of(self.alternatives(schema, depth))
        if item is not None:
            yield {"type": "array", "items": item, "minItems": 1}

    def _not(self, schema: Any, _depth: int) -> Iterator[Schema]:
        if isinstance(schema, dict):
            yield self._rewrite(schema)

    def _all_of(self, schemas: Any, depth: int) -> Iterator[Schema]:
        for schema in schemas if isinstance(schemas, list) else ():
            yield from self.alternatives(schema, depth)

    def _any_of(self, schemas: Any, depth: int) -> Iterator[Schema]:
        if not isinstance(schemas, list) or not schemas:
            return
        each = [any_of(self.alternatives(schema, depth)) for schema in schemas]
        all_of = [some for some in each if some is not None]
        if len(all_of) == len(each):
            yield {"allOf": all_of}


def any_of(schemas: Sequence[Schema]) -> Schema | None:
    """Return a schema that any of `schemas` satisfies; None if there are none."""
    if len(schemas) < 2:
        return schemas[0] if schemas else None
    return {"anyOf": list(schemas)}


def _other_types(names: Sequence[str]) -> Iterator[Schema]:
    # Integers are numbers. Numbers that are not integers have no type of their own.
    numbers = {"integer", "number"}
    excluded = {*names, *(numbers if numbers & set(names) else ("integer",))}
    others = [name for name in TYPES if name not in excluded]
    if others:
        yield {"type": others}


def _type_of(value: Any) -> str:
    kind = kind_of(value)
    return "number" if kind in ("integer", "fraction") else kind


def _bound(kind: str, name: str, change: int = 0) -> Callable[[Any], Iterator[Schema]]:
    """Return the rule of a limit: a value of its type is beyond it if it meets the opposite one."""

    def rule(limit: Any) -> Iterator[Schema]:
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            return
        if kind == "number":
            yield {"type": kind, name: limit}
        elif kind_of(limit) == "integer" and limit + change >= 0:
            yield {"type": kind, name: int(limit) + change}

    return rule


# An exclusive limit is a boolean in older drafts, next to one of these.
BOUNDS: Mapping[str, Callable[[Any], Iterator[Schema]]] = {
    "minimum": _bound("number", "exclusiveMaximum"),
    "maximum": _bound("number", "exclusiveMinimum"),
    "minLength": _bound("string", "maxLength", -1),
    "maxLength": _bound("string", "minLength", 1),
    "minItems": _bound("array", "maxItems", -1),
    "maxItems": _bound("array", "minItems", 1),
}
