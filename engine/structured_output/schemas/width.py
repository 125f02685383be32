"""Products that a compiler gets when it combines the parts of a schema. Pure.

`allOf` of several `anyOf` is compiled by distribution: the product of their branches, which can
take any time and memory. Branches are estimated, for objects also those of each property. `allOf`
of patterns is compiled by intersection, whose states and transitions are products, too, and of
which llguidance counts only the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from baton.engine.structured_output.schemas.measure import Measure, Rules, TooLarge
from baton.engine.structured_output.schemas.pattern_size import pattern_size
from baton.engine.structured_output.schemas.patterns import exclude_zero
from baton.engine.structured_output.schemas.string_complement import ANYTHING
from baton.engine.structured_output.schemas.subschemas import list_subschemas

MAX_WIDTH = 400
# 20 patterns that may match anywhere in a text took minutes, 10 take 10 ms.
MAX_JOINED_PATTERNS = 8
# With those of negations, of which 16 take 0.6 s, 20 took 1.3 s and 40 more than 6 s.
MAX_NEGATED_PATTERNS = 16
# Of the sizes of joined patterns: 8 of ten alternatives each were not compiled after 10 s.
MAX_PATTERN_PRODUCT = 100_000

WIDTH = Rules(lambda _schema: 1, prod, sum, MAX_WIDTH)
_PATTERNS = Rules(
    lambda schema: int("pattern" in schema), sum, max, MAX_JOINED_PATTERNS, is_deep=True
)
_NEGATED = Rules(_PATTERNS.own, sum, max, MAX_NEGATED_PATTERNS, is_deep=True)
_ANY_JOINED = Rules(_PATTERNS.own, sum, max, 1, is_deep=True)


def is_too_wide(schema: Any) -> bool:
    """Return whether some part of a schema has too many alternatives, or is too large to tell."""
    return _exceeds(schema, WIDTH)


def joins_many_patterns(schema: Any) -> bool:
    """Return whether one string has to match too many patterns, or the schema is too large."""
    return _num_patterns(schema) > MAX_JOINED_PATTERNS and _exceeds(schema, _PATTERNS)


def joins_many_negations(schema: Any) -> bool:
    """Return the same for a rewritten schema, in which negations of strings are patterns."""
    return _num_patterns(schema) > MAX_NEGATED_PATTERNS and _exceeds(schema, _NEGATED)


def joins_large_patterns(schema: Any, rewritten: Any) -> bool:
    """Return whether the patterns that one string has to match are too large together.

    Those of negations count as they can be matched: the complement of texts in one place at a time,
    that of a set of characters in two.
    """
    if _num_patterns(rewritten) < 2 or not _exceeds(rewritten, _ANY_JOINED):
        return False
    given = {exclude_zero(part["pattern"]) for part in _parts_with_patterns(schema)}

    def factor(part: Mapping[str, Any]) -> int:
        pattern = part.get("pattern")
        if not isinstance(pattern, str):
            return 1
        if pattern in given:
            return pattern_size(pattern) + 2
        return 1 if ANYTHING in pattern else 3

    return _exceeds(rewritten, Rules(factor, prod, sum, MAX_PATTERN_PRODUCT, is_deep=True))


def _num_patterns(schema: Any) -> int:
    return sum(1 for _ in _parts_with_patterns(schema))


def _parts_with_patterns(schema: Any) -> Iterator[Mapping[str, Any]]:
    parts = list_subschemas(schema)
    return (part for part in parts if isinstance(part.get("pattern"), str))


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
