"""Work of merging the parts of a schema, which llguidance's limits do not bound. Pure.

Merging parts that apply to the same value compares each alternative of one with each of the others,
and copies them. It also proves that patterns of names differ, for each pair of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.measure import ANY_MEMBER, Measure, Rules, TooLarge
from baton.engine.structured_output.schemas.subschemas import (
    CONSTRAINTS,
    list_subschemas,
    read_list,
)
from baton.engine.structured_output.schemas.width import WIDTH

# Combinations of alternatives by the parts of each: 16 million took 1.5 s. JSONSchemaBench's
# schemas have up to 0.8 million.
MAX_MERGING_WORK = 5_000_000
# Pairs of patterns of names, by their characters: 300 short ones took 4 s.
MAX_NAME_PATTERN_WORK = 20_000_000
_NO_LIMIT = 1 << 40
_IN_PLACE = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def _name_patterns(schema: Mapping[str, Any]) -> Sequence[str]:
    by_pattern = schema.get("patternProperties")
    return tuple(by_pattern) if isinstance(by_pattern, Mapping) else ()


def _num_values(schema: Mapping[str, Any]) -> int:
    return len(read_list(schema, "enum"))


def _num_parts(schema: Mapping[str, Any]) -> int:
    """Return the number of parts in a schema, except those that apply to the same value."""
    inner = [value for name, value in schema.items() if name not in _IN_PLACE]
    return 1 + _num_values(schema) + sum(1 for _ in list_subschemas(inner))


_ALTERNATIVES = Rules(lambda part: max(_num_values(part), 1), prod, sum, _NO_LIMIT, is_deep=True)
_PARTS = Rules(_num_parts, sum, sum, _NO_LIMIT)
_NAME_PATTERNS = Rules(lambda part: len(_name_patterns(part)), sum, sum, _NO_LIMIT)
_NAME_CHARACTERS = Rules(lambda part: sum(map(len, _name_patterns(part))), sum, sum, _NO_LIMIT)


def merges_too_much(schema: Any) -> bool:
    """Return whether merging the parts of a schema, as it is compiled, takes too much work."""
    alternatives, sizes = Measure(schema, _ALTERNATIVES), Measure(schema, _PARTS)
    try:
        work = sum(
            _num_combinations(alternatives.sizes(part)) * sizes.sizes(part)[""]
            for part in list_subschemas(schema)
            if _merges(part)
        )
    except TooLarge:
        return True
    return work > MAX_MERGING_WORK


def has_many_name_patterns(schema: Any) -> bool:
    """Return whether proving that the patterns of names differ takes too much work."""
    if sum(len(_name_patterns(part)) for part in list_subschemas(schema)) < 2:
        return False
    numbers, characters = Measure(schema, _NAME_PATTERNS), Measure(schema, _NAME_CHARACTERS)
    widths = Measure(schema, WIDTH)
    work = 0
    try:
        for part in list_subschemas(schema):
            if _name_patterns(part) or _merges(part):
                number = numbers.sizes(part)[""]
                work += number**2 * characters.sizes(part)[""] * widths.sizes(part)[""]
    except TooLarge:
        return True
    return work > MAX_NAME_PATTERN_WORK


def _num_combinations(sizes: Mapping[str, int]) -> int:
    """Return the combinations of alternatives of the value itself and of each of its members."""
    of_any = sizes.get(ANY_MEMBER, 1)
    return sum(size if name in ("", ANY_MEMBER) else size * of_any for name, size in sizes.items())


def _merges(part: Mapping[str, Any]) -> bool:
    """Return whether a part has several schemas that must all hold."""
    num_schemas = len(read_list(part, "allOf")) + len({"anyOf", "oneOf", "$ref"} & part.keys())
    return num_schemas + bool(part.keys() & CONSTRAINTS - _IN_PLACE) > 1
