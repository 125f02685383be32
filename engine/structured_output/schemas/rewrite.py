"""Rewriting of JSON schemas into the subset that llguidance supports. Pure.

A rewritten schema allows no value that the original forbids. It is equivalent where possible, and
narrower where the grammar would have to count or compare: see docs/structured-output.md. Keywords
that cannot be rewritten stay, and llguidance refuses them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from baton.engine.structured_output.schemas.disjointness import Disjointness
from baton.engine.structured_output.schemas.negation import (
    Negation,
    NegationLimitExceeded,
    any_of,
)
from baton.engine.structured_output.schemas.object_rules import (
    DEPENDENCIES,
    dependencies,
    property_counts,
    property_names,
)
from baton.engine.structured_output.schemas.patterns import without_zero
from baton.engine.structured_output.schemas.proof_steps import ProofSteps
from baton.engine.structured_output.schemas.subschemas import (
    CONSTRAINTS,
    allows_anything,
    read_list,
    rewrite_subschemas,
    rewrite_with_originals,
)
from baton.engine.structured_output.schemas.unique_items import (
    is_unique_anyway,
    item_values,
    unique_lists,
)
from baton.engine.structured_output.schemas.width import MAX_WIDTH

Schema = dict[str, Any]

KNOWN_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "unknown"),
    }
)
NEGATED = frozenset({"not"})  # a narrower schema there would widen the whole
NEXT_TO_REFS = frozenset({"description", "title", "default", "examples", "$comment"})
IGNORE_NEXT_TO_REFS = ("/draft-03/", "/draft-04/", "/draft-06/", "/draft-07/")


def prepare_schema(
    schema: Schema,
    steps: ProofSteps | None = None,
    *,
    are_items_compared: bool = False,
    splits_one_of: bool = True,
) -> Schema:
    """Return the rewritten schema. llguidance rejects the keywords that remain unsupported.

    `are_items_compared`: the matcher keeps items unique, so that the grammar need not.
    `splits_one_of`: branches that overlap are narrowed, which multiplies alternatives.
    """
    rewriting = _Rewriting(schema, steps or ProofSteps(), are_items_compared, splits_one_of)
    ready = rewriting.rewrite(schema)
    exact: Schema = rewrite_subschemas(ready, without_zero)
    return exact


class _Rewriting:
    """Rules for the parts of one schema.

    A rule takes a part whose subschemas are rewritten, and the original part, since only originals
    can be negated. It returns schemas that replace its keywords, or None if it cannot.
    """

    def __init__(
        self, root: Schema, steps: ProofSteps, are_items_compared: bool, splits_one_of: bool
    ) -> None:
        self._root = root
        self._are_items_compared = are_items_compared
        self._splits_one_of = splits_one_of
        draft = root.get("$schema")
        self._ignores_next_to_refs = isinstance(draft, str) and any(
            old in draft for old in IGNORE_NEXT_TO_REFS
        )
        self._disjointness = Disjointness(root, steps)
        self._negation = Negation(root, self.rewrite, steps)
        self._rules: Mapping[tuple[str, ...], Callable[[Schema, Schema], list[Any] | None]] = {
            ("oneOf",): self._one_of,
            ("not",): self._not,
            ("if", "then", "else"): self._if,
            DEPENDENCIES: lambda part, _: dependencies(part),
            ("propertyNames",): lambda part, _: property_names(part, self._root),
            ("minProperties", "maxProperties"): lambda part, _: property_counts(part),
            ("uniqueItems",): self._unique_items,
        }

    def rewrite(self, schema: Any) -> Any:
        return rewrite_with_originals(schema, self._change, kept=NEGATED)

    def _change(self, part: Schema, original: Schema) -> Schema:
        name = part.get("format")
        if isinstance(name, str) and name not in KNOWN_FORMATS:
            del part["format"]
        if isinstance(part.get("$ref"), str):
            # Annotations next to a reference count as constraints where it refers to itself.
            part = {name: value for name, value in part.items() if name not in NEXT_TO_REFS}
            if self._ignores_next_to_refs:
                ignored = CONSTRAINTS - {"$ref"}
                part = {name: value for name, value in part.items() if name not in ignored}
        for keywords, rule in self._rules.items():
            if part.keys().isdisjoint(keywords):
                continue
            try:
                clauses = rule(part, original)
            except NegationLimitExceeded:
                clauses = None
            if clauses is not None:
                rest = {name: value for name, value in part.items() if name not in keywords}
                part = _with_clauses(rest, clauses)
        return part

    def _one_of(self, part: Schema, original: Schema) -> list[Schema] | None:
        branches, originals = read_list(part, "oneOf"), read_list(original, "oneOf")
        if not branches or len(branches) > MAX_WIDTH:
            return None
        rest = {name: value for name, value in part.items() if name != "oneOf"}
        # Older drafts ignore keywords next to a reference.
        also = True if "$ref" in rest else rest
        if self._disjointness.at_most_one_matches(originals, also):
            return [{"anyOf": list(branches)}]
        if not self._splits_one_of:
            return None
        alternatives: list[Any] = []
        for index, branch in enumerate(branches):
            conditions = [branch]
            for other, schema in enumerate(originals):
                pair = (originals[index], schema)
                if other == index or self._disjointness.at_most_one_matches(pair, also):
                    continue
                if allows_anything(schema):
                    conditions.append(False)
                    continue
                forbidden = self._negation.alternatives(schema)
                if not forbidden:
                    return None
                conditions.append(self._any_possible(forbidden, originals[index], also))
            if False not in conditions:
                alternatives.append(branch if len(conditions) == 1 else {"allOf": conditions})
        return [{"anyOf": alternatives}] if alternatives else None

    def _not(self, part: Schema, original: Schema) -> list[Any] | None:
        if allows_anything(original["not"]):
            return [False]
        forbidden = self._negation.alternatives(original["not"])
        rest = {name: value for name, value in part.items() if name != "not"}
        return [self._any_possible(forbidden, rest)] if forbidden else None

    def _if(self, part: Schema, original: Schema) -> list[Schema] | None:
        if "if" not in part or not {"then", "else"} & part.keys():
            return []  # without effect
        rest = {name: value for name, value in part.items() if name not in ("if", "then", "else")}
        met = {"allOf": [part["if"], part.get("then", True)]}
        forbidden = self._negation.alternatives(original["if"])
        if not forbidden and original["if"] not in (True, {}):
            return None
        otherwise = self._any_possible(forbidden, rest)
        unmet = [{"allOf": [otherwise, part["else"]]} if "else" in part else otherwise]
        return [{"anyOf": [met, *(each for each in unmet if each is not False)]}]

    def _any_possible(self, schemas: Sequence[Schema], *also: Any) -> Any:
        """Return a schema of any of `schemas`, without those that exclude one of `also`."""
        possible = [
            schema
            for schema in schemas
            if not any(self._disjointness.at_most_one_matches((schema, each)) for each in also)
        ]
        return any_of(possible) or False

    def _unique_items(self, part: Schema, original: Schema) -> list[Schema] | None:
        if is_unique_anyway(part):
            return []
        if self._are_items_compared:
            values = item_values(original.get("items"), self._root)
            return [] if values is None else [{"maxItems": len(values)}]
        lists = unique_lists(original, self._root)
        return None if lists is None else [lists]


def _with_clauses(part: Schema, clauses: Sequence[Any]) -> Schema:
    """Return the part with schemas, booleans included, that must hold next to it."""
    match clauses:
        case []:
            return part
        case [{"anyOf": branches, **others}] if not others and "anyOf" not in part:
            return {**part, "anyOf": branches}
    return {**part, "allOf": [*read_list(part, "allOf"), *clauses]}
