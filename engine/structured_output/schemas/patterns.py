r"""Patterns without what llguidance 1.9 cannot translate to JSON: U+0000, look-around. Pure.

A set of characters that has all control characters also matches the escapes `\"` and `\\`, although
`"` or `\` is not in the set: `^[^"]*$` matched a quotation mark. Without U+0000 it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
