"""Rewriting of keywords about the names and the number of an object's properties. Pure.

Each rule returns what replaces its keywords, as schemas that hold next to the others, or None if
they cannot be enforced. A property whose schema is `False` must be absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any

from baton.engine.structured_output.schemas.subschemas import read_list, resolve_pointer

Schema = dict[str, Any]

MAX_SETS = 64  # sets of properties, each of which is an alternative
MAX_REFERENCES = 8
DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")


def dependencies(part: Schema) -> list[Schema] | None:
    clauses: list[Schema] = []
    for keyword in DEPENDENCIES:
        given = part.get(keyword, {})
        if not isinstance(given, dict) or not all(map(_is_needed, given.values())):
            return None
        clauses += (_dependency(name, needed) for name, needed in given.items() if needed != [])
    return clauses


def _is_needed(value: Any) -> bool:
    names = value if isinstance(value, list) else ()
    return isinstance(value, dict | bool | list | str) and all(
        isinstance(name, str) for name in names
    )


def _dependency(name: str, needed: Any) -> Schema:
    """Return a schema of objects that lack a property, or have what it needs."""
    present: Schema = {"type": "object", "required": [name]}
    match needed:
        case str():  # of draft 3
            present["required"].append(needed)
        case list():
            present["required"] += needed
        case _:
            present["allOf"] = [needed]
    return {"anyOf": [{"properties": {name: False}}, present]}


def property_names(part: Schema, root: Any) -> list[Schema] | None:
    names = part["propertyNames"]
    for _ in range(MAX_REFERENCES):
        if isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = resolve_pointer(root, names["$ref"])
    if names is True or (isinstance(names, dict) and not names.keys() - ANNOTATIONS):
        return []
    if names is False:
        return [{"additionalProperties": False}] if not _has_names(part) else None
    if not isinstance(names, dict) or "patternProperties" in part:
        return None
    constraints = names.keys() - ANNOTATIONS
    rest = part.get("additionalProperties", True)
    if constraints == {"enum"} and isinstance(names["enum"], list):
        return [_only_names(part, [each for each in names["enum"] if isinstance(each, str)])]
    is_pattern = constraints == {"pattern"} and isinstance(names["pattern"], str)
    if is_pattern and not part.get("properties"):
        return [{"patternProperties": {names["pattern"]: rest}, "additionalProperties": False}]
    return None


# Keywords that leave names as they are. By the standard, `format` is an annotation.
ANNOTATIONS = frozenset({"type", "format", "description", "title", "$comment", "examples"})


def _has_names(part: Schema) -> bool:
    return bool(part.get("properties") or part.get("patternProperties"))


def _only_names(part: Schema, names: Sequence[str]) -> Schema:
    properties = _properties(part)
    rest = part.get("additionalProperties", True)
    return {
        "properties": {name: properties.get(name, rest) for name in names},
        "additionalProperties": False,
    }


def _properties(part: Schema) -> Mapping[str, Any]:
    """Return the properties, none if they have another form: llguidance refuses that."""
    found = part.get("properties")
    return found if isinstance(found, dict) else {}


def property_counts(part: Schema) -> list[Schema] | None:
    """Enforce `minProperties` and `maxProperties` by the sets of named properties.

    Narrow: properties without a name in the schema are left out where they would count.
    """
    fewest, most = part.get("minProperties", 0), part.get("maxProperties")
    if not isinstance(fewest, int) or not isinstance(most, int | None):
        return None
    if most == 0:
        return [_allow_only(part, ())]
    names = list(_properties(part))
    needed = [name for name in read_list(part, "required") if name in names]
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    is_below = most is None or (is_closed and len(names) <= most)
    if is_below:
        if fewest <= len(needed):
            return []
        return _sets(names, fewest, lambda some: {"type": "object", "required": list(some)}, part)
    assert most is not None
    if fewest > 1 and fewest != most:
        return None

    def allow(some: Sequence[str]) -> Schema:
        needs = {"required": list(some)} if fewest == most else {}
        return {**_allow_only(part, some), **needs}

    clauses = _sets(names, most, allow, part)
    if clauses and fewest == 1 and most > 1:
        least = _sets(names, 1, lambda some: {"type": "object", "required": list(some)}, part)
        return None if least is None else [*clauses, *least]
    return clauses


def _sets(names: Sequence[str], size: int, schema_of: Any, part: Schema) -> list[Schema] | None:
    """Return a clause with an alternative for each set of `size` names."""
    if not 0 < comb(len(names), size) <= MAX_SETS:
        return None
    others = [] if part.get("type") == "object" else [{"type": NOT_OBJECTS}]
    return [{"anyOf": [*others, *map(schema_of, combinations(names, size))]}]


NOT_OBJECTS = ["null", "boolean", "number", "string", "array"]


def _allow_only(part: Schema, names: Sequence[str]) -> Schema:
    absent = {name: False for name in _properties(part) if name not in names}
    kept = dict.fromkeys(names, True)
    return {"properties": {**kept, **absent}, "additionalProperties": False}
