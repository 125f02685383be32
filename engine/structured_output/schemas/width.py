"""Products that a compiler gets when it combines the parts of a schema. Pure.

`allOf` of several `anyOf` is compiled by distribution: the product of their branches, which can
take any time and memory. Branches are estimated, for objects also those of each property. `allOf`
of patterns is compiled by intersection, whose states and transitions are products, too, and of
which llguidance counts only the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.measure import Measure, Rules, TooLarge
from baton.engine.structured_output.schemas.pattern_size import pattern_size
from baton.engine.structured_output.schemas.subschemas import list_subschemas

MAX_WIDTH = 400
# 20 patterns that may match anywhere in a text took minutes, 10 take 10 ms.
MAX_JOINED_PATTERNS = 8
# Of the sizes of joined patterns: 8 of ten alternatives each took minutes and all memory.
MAX_PATTERN_PRODUCT = 100_000


def _pattern_factor(schema: Mapping[str, Any]) -> int:
    pattern = schema.get("pattern")
    return pattern_size(pattern) + 2 if isinstance(pattern, str) else 1


WIDTH = Rules(lambda _schema: 1, prod, sum, MAX_WIDTH)
_PATTERNS = Rules(
    lambda schema: int("pattern" in schema), sum, max, MAX_JOINED_PATTERNS, is_deep=True
)
_ANY_JOINED = Rules(_PATTERNS.own, sum, max, 1, is_deep=True)
_PATTERN_PRODUCT = Rules(_pattern_factor, prod, sum, MAX_PATTERN_PRODUCT, is_deep=True)


def is_too_wide(schema: Any) -> bool:
    """Return whether some part of a schema has too many alternatives, or is too large to tell."""
    return _exceeds(schema, WIDTH)


def joins_many_patterns(schema: Any) -> bool:
    """Return whether one string has to match too many patterns, or the schema is too large."""
    return _num_patterns(schema) > MAX_JOINED_PATTERNS and _exceeds(schema, _PATTERNS)


def joins_large_patterns(schema: Any) -> bool:
    """Return whether the patterns that one string has to match are too large together.

    Takes the schema before it is rewritten: patterns of negations are large, and cheap.
    """
    joins_any = _num_patterns(schema) > 1 and _exceeds(schema, _ANY_JOINED)
    return joins_any and _exceeds(schema, _PATTERN_PRODUCT)


def _num_patterns(schema: Any) -> int:
    return sum("pattern" in part for part in list_subschemas(schema))


def _exceeds(schema: Any, rules: Rules) -> bool:
    measure = Measure(schema, rules)
    try:
        sizes = [measure.largest(part) for part in list_subschemas(schema)]
        if rules.is_deep:
            # What was measured inside of a reference to itself is too small.
            measure = Measure(schema, rules, measure.known)
            sizes = [measure.largest(part) for part in list_subschemas(schema)]
    except TooLarge:
        return True
    return max(sizes, default=0) > rules.limit
