"""Rewriting of JSON schemas into the subset that llguidance supports. Pure.

A rewritten schema allows no value that the original forbids. Keywords without a rule stay, and
llguidance refuses them by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from baton.engine.structured_output.schemas.disjointness import Disjointness, json_key
from baton.engine.structured_output.schemas.patterns import translatable
from baton.engine.structured_output.schemas.subschemas import (
    CONSTRAINTS,
    read_list,
    rewrite_subschemas,
)
from baton.engine.structured_output.schemas.unique_arrays import is_unique_anyway
from baton.engine.structured_output.schemas.work import Work

Schema = dict[str, Any]

KNOWN_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    }
)
NEXT_TO_REFS = frozenset({"description", "title", "default", "examples", "$comment"})
IGNORE_NEXT_TO_REFS = ("/draft-03/", "/draft-04/", "/draft-06/", "/draft-07/")
# Keywords that leave names as they are. By the standard, `format` is an annotation.
NAME_ANNOTATIONS = frozenset({"type", "format", "description", "title", "$comment", "examples"})


def prepare_schema(schema: Schema, work: Work, *, are_items_compared: bool = False) -> Schema:
    """Return the rewritten schema. Raises TooMuchWork.

    `are_items_compared`: the matcher keeps items unique, so that the grammar need not.
    """
    rewriting = _Rewriting(schema, work, are_items_compared)
    ready: Schema = rewrite_subschemas(schema, rewriting.change)
    if rewriting.narrows and rewriting.leaves_one_of:
        # llguidance would compare narrower branches than those that have to exclude each other.
        rewriting.narrows = False
        ready = rewrite_subschemas(schema, rewriting.change)
    return ready


class _Rewriting:
    """Rules for the parts of one schema, whose subschemas are still the original ones."""

    def __init__(self, root: Schema, work: Work, are_items_compared: bool) -> None:
        self._are_items_compared = are_items_compared
        draft = root.get("$schema")
        self._ignores_next_to_refs = isinstance(draft, str) and any(
            old in draft for old in IGNORE_NEXT_TO_REFS
        )
        self._disjointness = Disjointness(root, work)

        self.narrows, self.leaves_one_of = True, False

    def change(self, part: Schema) -> Schema:
        name = part.get("format")
        if isinstance(name, str) and name not in KNOWN_FORMATS:
            part = _without(part, ("format",))
        if isinstance(part.get("$ref"), str):
            # Annotations next to a reference count as constraints where it refers to itself.
            ignored = CONSTRAINTS - {"$ref"} if self._ignores_next_to_refs else frozenset()
            part = _without(part, NEXT_TO_REFS | ignored)
        for keyword, rule in (
            ("oneOf", self._one_of),
            ("not", _never),
            ("propertyNames", self._property_names),
            ("uniqueItems", self._unique_items),
        ):
            if keyword in part:
                part = rule(part)
        return translatable(part)

    def _one_of(self, part: Schema) -> Schema:
        """Replace branches that exclude each other, or do so with a property or without others."""
        branches, rest = read_list(part, "oneOf"), _without(part, ("oneOf",))
        # Older drafts ignore keywords next to a reference.
        also = {} if "$ref" in rest else rest
        if branches and self._disjointness.at_most_one_matches(branches, also):
            return _with_clause(rest, {"anyOf": branches})
        tag = _tag_of(part)
        required = {"required": [*read_list(also, "required"), tag]}
        if (
            tag
            and self.narrows
            and self._disjointness.at_most_one_matches(branches, {**also, **required})
        ):
            return _with_clause({**rest, **required}, {"anyOf": branches})
        alternatives = self._alternatives(branches, also) if self.narrows else []
        self.leaves_one_of |= not alternatives
        return _with_clause(rest, {"anyOf": alternatives}) if alternatives else part

    def _alternatives(self, branches: Sequence[Any], also: Schema) -> list[Any]:
        """Return the branches without a property that each other one requires, if they can be.

        Narrow: the properties are absent, though one with another value would suffice.
        """
        alternatives: list[Any] = []
        for index, branch in enumerate(branches):
            absent = self._absent_names(branches, index, also)
            if None in absent:
                return []
            clause = {"type": "object", "properties": dict.fromkeys(absent, False)}
            alternatives.append({"allOf": [branch, clause]} if absent else branch)
        return alternatives

    def _absent_names(self, branches: Sequence[Any], index: int, also: Schema) -> list[str | None]:
        """Return a property of each branch that can match with this one; None if it has none."""
        own = self._required(branches[index]) | self._required(also)
        others = [*branches[:index], *branches[index + 1 :]]
        return [
            min(self._required(other) - own, default=None)
            for other in others
            if not self._disjointness.at_most_one_matches((branches[index], other), also)
        ]

    def _required(self, schema: Any) -> set[str]:
        schema = self._disjointness.resolve(schema)
        names = read_list(schema, "required") if isinstance(schema, dict) else ()
        return {name for name in names if isinstance(name, str)}

    def _property_names(self, part: Schema) -> Schema:
        names = self._disjointness.resolve(part["propertyNames"])
        rest = _without(part, ("propertyNames",))
        given = _without(names, NAME_ANNOTATIONS) if isinstance(names, dict) else names
        if given is True or given == {}:
            return rest
        pattern = _pattern_of(given) if isinstance(given, dict) and len(given) == 1 else None
        if pattern is None or part.get("properties") or part.get("patternProperties"):
            return part
        of_names = {pattern: part.get("additionalProperties", True)}
        return {**rest, "patternProperties": of_names, "additionalProperties": False}

    def _unique_items(self, part: Schema) -> Schema:
        rest = _without(part, ("uniqueItems",))
        if is_unique_anyway(part):
            return rest
        if not self._are_items_compared:
            return part
        items = self._disjointness.resolve(part.get("items"))
        if not isinstance(items, dict) or "enum" not in items:
            return rest
        values = set(map(json_key, read_list(items, "enum")))
        return _with_clause(rest, {"maxItems": len(values)})


def _without(part: Schema, names: Iterable[str]) -> Schema:
    return {name: value for name, value in part.items() if name not in names}


def _tag_of(part: Schema) -> str | None:
    """Return the property by which the branches of a discriminated union differ."""
    discriminator = part.get("discriminator")
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return tag if isinstance(tag, str) else None


def _never(part: Schema) -> Schema:
    """Replace `not` of anything, by which generators write what cannot be."""
    if part["not"] is not True and part["not"] != {}:
        return part
    return _with_clause(_without(part, ("not",)), False)


def _pattern_of(names: Schema) -> str | None:
    match names:
        case {"pattern": str(pattern)}:
            return pattern
        case {"enum": [*values]}:
            texts = [each for each in values if isinstance(each, str)]
            return f"^({'|'.join(map(_escape, texts))})$" if texts else None
    return None


def _escape(text: str) -> str:
    return re.sub(r"\W", lambda found: rf"\x{{{ord(found[0]):x}}}", text)


def _with_clause(part: Schema, clause: Any) -> Schema:
    """Return the part with a schema that must hold next to it."""
    if isinstance(clause, dict) and part.keys().isdisjoint(clause):
        return {**part, **clause}
    return {**part, "allOf": [*read_list(part, "allOf"), clause]}
