"""Closing of the schemas of forced tool calls: no names but those of the schema. Pure.

A model that is forced to call a function and may add arguments of its own invents them, often
until `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from baton.engine.structured_output.schemas.subschemas import (
    list_subschemas,
    resolve_pointer,
    rewrite_subschemas,
)

Schema = dict[str, Any]

# Keywords by which an object decides about names that `properties` does not have.
DECIDING = frozenset({"additionalProperties", "unevaluatedProperties"})
OF_OBJECTS = frozenset({"properties", "patternProperties", "required"})
ALTERNATIVES = ("anyOf", "oneOf")


@dataclass(slots=True)
class ClosingWork:
    """Steps through combined schemas that are left for one request, about a microsecond each.

    Further combined schemas stay open.
    """

    num_steps_left: int = 1 << 13


def close_objects(schema: Schema, work: ClosingWork | None = None) -> Schema:
    """Return a copy with `additionalProperties: false` in each object that has `properties`.

    An object that decides about other names itself, or has no `properties`, stays as it is.
    """
    closed: Schema = rewrite_subschemas(schema, dict)
    _Closing(closed, work or ClosingWork()).close()
    return closed


class _Closing:
    """Closes the objects of one schema, in place.

    Schemas that apply to the same object together are closed as one, by all their names: closed
    alone, each would exclude the names of the others.
    """

    def __init__(self, root: Schema, work: ClosingWork) -> None:
        self._parts = list(list_subschemas(root))
        self._targets = {
            id(part): resolve_pointer(root, part["$ref"])
            for part in self._parts
            if isinstance(part.get("$ref"), str)
        }
        self._work = work

    def close(self) -> None:
        combined = [part for part in self._parts if _is_combined(part)]
        inner = set(map(id, self._reach(combined)))
        is_combined = set(map(id, combined))
        for part in self._parts:
            if id(part) in inner:
                continue
            if id(part) not in is_combined:
                _close(part, [])
            elif self._work.num_steps_left > 0:
                others = list(self._reach([part]))
                self._work.num_steps_left -= len(others) + _close(part, others)

    def _reach(self, parts: list[Schema]) -> Iterator[Schema]:
        """Yield all other schemas that can apply to the same values as one of `parts`."""
        seen: set[int] = set()
        pending = [each for part in parts for each in self._applied_by(part)]
        while pending:
            each = pending.pop()
            if isinstance(each, dict) and id(each) not in seen:
                seen.add(id(each))
                yield each
                pending += self._applied_by(each)

    def _applied_by(self, part: Schema) -> list[Any]:
        lists = (_read_list(part, name) for name in ("allOf", *ALTERNATIVES))
        return [*(each for items in lists for each in items), self._targets.get(id(part))]


def _is_combined(part: Schema) -> bool:
    """Return whether several schemas apply to the value that `part` describes."""
    num_references = sum(name in part for name in (*ALTERNATIVES, "$ref"))
    num_own = 1 if OF_OBJECTS & part.keys() else 0
    num_others = num_references + len(_read_list(part, "allOf"))
    return num_others > 0 and num_own + num_others > 1


def _close(part: Schema, others: list[Schema]) -> int:
    """Close the object and return the number of its names; 0 if it stays as it is."""
    group, own = [part, *others], part.get("properties", {})
    named = [each["properties"] for each in group if isinstance(each.get("properties"), dict)]
    decides = any(DECIDING & each.keys() for each in group)
    if decides or not named or not isinstance(own, dict):
        return 0
    names = {name for properties in named for name in properties}
    required = (name for each in group for name in _read_list(each, "required"))
    names.update(name for name in required if isinstance(name, str))
    part["properties"] = {**own, **dict.fromkeys(sorted(names - own.keys()), True)}
    part["additionalProperties"] = False
    return len(names)


def _read_list(part: Schema, name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []
