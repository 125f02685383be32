r"""Patterns without what llguidance 1.9 cannot translate, and the cost of schemas. Pure.

A set of characters that has all control characters also matches the escapes `\"` and `\\`, although
`"` or `\` is not in the set: `^[^"]*$` matched a quotation mark. Without U+0000 it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from math import lcm
from typing import Any

from baton.core.structured_outputs import MAX_CHARACTERS
from baton.engine.structured_output.schemas.subschemas import list_objects

_NEGATION = re.compile(r"\[\^|\\P(\{[^}]*\}|[A-Z])|\\.", re.DOTALL)
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
# Patterns of client libraries, with those of the same texts without look-around.
_LOOKING_AROUND = {
    # `z.email()` of zod 4.0 and 4.1. Later ones have the other pattern themselves.
    rf"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]{_DOMAIN}": (
        rf"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]{_DOMAIN}"
    )
}
_RANGE_FROM_ZERO = re.compile(r"(?<!\^)\\(?:x00|x\{0+\}|u0000|u\{0+\}|0)-|\x00-")
MAX_PATTERN_CHARACTERS = MAX_CHARACTERS["regex"]
MAX_REMAINDERS = 10_000
# Each optional property can be followed by each later one of its object.
MAX_OPTIONAL_PAIRS = 8_000_000


def translatable(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a part of a schema with patterns that llguidance can translate, as far as known.

    They do not match U+0000. Other patterns with look-around stay, and are refused by llguidance.
    """
    pattern, by_pattern = schema.get("pattern"), schema.get("patternProperties")
    changed = dict(schema)
    if isinstance(pattern, str):
        changed["pattern"] = exclude_zero(_LOOKING_AROUND.get(pattern, pattern))
    if isinstance(by_pattern, Mapping):
        changed["patternProperties"] = {
            exclude_zero(each): value for each, value in by_pattern.items()
        }
    return changed


def exclude_zero(pattern: str) -> str:
    """Return the pattern with U+0000 excluded from its negated sets."""
    return _NEGATION.sub(_exclude, pattern)


def list_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return the patterns of the value and of the names of its properties."""
    by_pattern = schema.get("patternProperties")
    patterns = [schema.get("pattern"), *(by_pattern if isinstance(by_pattern, Mapping) else ())]
    return [each for each in patterns if isinstance(each, str)]


def has_range_from_zero(pattern: str) -> bool:
    """Return whether the pattern has a range that begins with U+0000, which cannot be enforced."""
    return _RANGE_FROM_ZERO.search(pattern) is not None


def _exclude(found: re.Match[str]) -> str:
    if found[0] == "[^":
        return r"[^\x00"
    return rf"[^\x00\p{found[1]}]" if found[1] else found[0]


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
