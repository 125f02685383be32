"""Rewriting of `uniqueItems` into the lists that it allows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from baton.engine.structured_output.schemas.disjointness import json_key
from baton.engine.structured_output.schemas.subschemas import read_list, resolve_pointer

Schema = dict[str, Any]

MAX_LISTS = 128  # compiled in about 0.3 s
MAX_INTEGERS = 256
MAX_REFERENCES = 8
NOT_LISTS = ["null", "boolean", "number", "string", "object"]


def unique_lists(part: Schema, root: Any) -> Schema | None:
    """Return a schema of the lists without repeated items, or None if they cannot be listed.

    Narrow: if there are too many orders of the items, only the order of the enum is allowed.
    """
    values = item_values(part.get("items"), root)
    if values is None:
        return None
    sizes = _sizes(part, len(values))
    if _are_few(perm(len(values), size) for size in sizes):
        lists = [list(each) for size in sizes for each in permutations(values, size)]
    elif _are_few(comb(len(values), size) for size in sizes):
        lists = [list(each) for size in sizes for each in combinations(values, size)]
    else:
        return None
    unique: Schema = {"enum": lists}
    return unique if part.get("type") == "array" else {"anyOf": [{"type": NOT_LISTS}, unique]}


def _are_few(counts: Iterable[int]) -> bool:
    """Stop at the limit: further counts of many values have thousands of digits."""
    total = 0
    for count in counts:
        total += count
        if total > MAX_LISTS:
            return False
    return True


def is_unique_anyway(part: Schema) -> bool:
    max_items = part.get("maxItems")
    is_short = isinstance(max_items, int | float) and max_items <= 1
    return part["uniqueItems"] is False or is_short or _excludes_lists(part.get("type"))


def item_values(items: Any, root: Any) -> Sequence[Any] | None:
    """Return the values of an enum, each once."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(items, dict):
            return None
        if not isinstance(items.get("$ref"), str):
            break
        items = resolve_pointer(root, items["$ref"])
    if items is True or not isinstance(items, dict):
        return None
    if "enum" not in items:
        return _values_of_type(items)
    return list({json_key(value): value for value in read_list(items, "enum")}.values())


def _values_of_type(items: Schema) -> Sequence[Any] | None:
    least, most = items.get("minimum"), items.get("maximum")
    if items.get("type") == "boolean":
        return [False, True]
    if items.get("type") != "integer" or not isinstance(least, int) or not isinstance(most, int):
        return None
    return range(least, most + 1) if most - least < MAX_INTEGERS else None


def _sizes(part: Schema, num_values: int) -> range:
    fewest, most = part.get("minItems", 0), part.get("maxItems", num_values)
    is_counted = isinstance(fewest, int) and isinstance(most, int)
    return range(fewest, min(most, num_values) + 1) if is_counted else range(num_values + 1)


def _excludes_lists(types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    return all(isinstance(name, str) and name != "array" for name in names)
