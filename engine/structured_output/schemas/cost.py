"""Detection of schemas whose compilation cost llguidance's own limits do not bound."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from baton.core.structured_outputs import MAX_CHARACTERS
from baton.engine.structured_output.schemas.patterns import has_range_from_zero, list_patterns
from baton.engine.structured_output.schemas.subschemas import list_objects

MAX_PATTERN_CHARACTERS = MAX_CHARACTERS["regex"]
MAX_REMAINDERS = 10_000
# Each optional property can be followed by each later one of its object.
MAX_OPTIONAL_PAIRS = 8_000_000


def expense_reason(schema: Any) -> str | None:
    """Return why a schema is too expensive to compile, or None.

    Every object is checked, including constants, since references can point anywhere.
    """
    steps, num_pairs = 1, 0
    for part in list_objects(schema):
        for pattern in list_patterns(part):
            if len(pattern) > MAX_PATTERN_CHARACTERS:
                return (
                    f"it has a pattern of {len(pattern)} characters; at most "
                    f"{MAX_PATTERN_CHARACTERS} are allowed"
                )
            if has_range_from_zero(pattern):
                return "its pattern has a range that begins with U+0000: begin it with a later one"
        # If subschemas are combined, a number must be a multiple of all their multipleOf.
        steps = lcm(steps, _remainders(part.get("multipleOf")))
        if steps > MAX_REMAINDERS:
            return (
                f"its multipleOf values together have more than {MAX_REMAINDERS} remainders; "
                "make the numbers rounder"
            )
        num_pairs += _num_optional(part) ** 2
        if num_pairs > MAX_OPTIONAL_PAIRS:
            return "it has objects with thousands of optional properties; require some, or split it"
    return None


def _num_optional(part: Mapping[str, Any]) -> int:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict):
        return 0
    return len(properties) - (len(required) if isinstance(required, list) else 0)


def _remainders(multiple_of: Any) -> int:
    """Return the number of states that `multipleOf` needs. Powers of ten cost nothing."""
    if isinstance(multiple_of, bool) or not isinstance(multiple_of, int | float):
        return 1
    digits = "".join(map(str, Decimal(repr(multiple_of)).as_tuple().digits))
    return int(digits.rstrip("0") or 1)
