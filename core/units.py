"""Numbers with units: byte sizes parsed and formatted, counts of things formatted."""

from __future__ import annotations

import re

from baton.core.errors import InvalidConfig

GIB = 2**30
AUTO = "auto"

_FACTORS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WRITTEN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", re.IGNORECASE)


def parse_bytes(written: str | int) -> int:
    """Parse a size such as 4096, "512MiB" or "1.5g". All units are binary."""
    if isinstance(written, int):
        return written
    match = _WRITTEN.fullmatch(written)
    if match is None:
        raise InvalidConfig(f"{written!r} is not a size in bytes; write it like 512MiB or 2GiB")
    return int(float(match[1]) * _FACTORS[match[2].upper()])


def parse_kv_memory(written: str | int) -> int | None:
    """Parse a size like `parse_bytes`; None for auto."""
    is_auto = isinstance(written, str) and written.strip().lower() == AUTO
    return None if is_auto else parse_bytes(written)


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s in the plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_bytes(num_bytes: float) -> str:
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} GiB"
