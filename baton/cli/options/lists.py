"""Comma-separated values of options."""

from __future__ import annotations

import re

from baton.core.errors import InvalidConfig

CPU_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


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


def parse_cpus(written: str) -> tuple[int, ...]:
    """Parse a list of CPU cores: `0-3,6` names five."""
    cpus: list[int] = []
    for part in filter(None, written.split(",")):
        match = CPU_RANGE.fullmatch(part.strip())
        if match is None:
            raise InvalidConfig(f"--cpus {written!r}: write it like 0-3,6")
        cpus.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(cpus)
