"""Comma-separated values of options."""

from __future__ import annotations

from baton.core.errors import InvalidConfig


def parse_names(written: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in written.split(","))


def parse_numbers(written: str) -> tuple[int, ...]:
    """Parse positive numbers. Raises InvalidConfig."""
    try:
        numbers = tuple(int(one) for one in written.split(","))
    except ValueError:
        raise InvalidConfig(f"{written!r} is not a list of numbers; write it like 1,4,16") from None
    if min(numbers) < 1:
        raise InvalidConfig(f"{written!r}: every number must be at least 1")
    return numbers
