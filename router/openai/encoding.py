"""JSON of large answers, written in slices: the event loop serves others in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SLICE_CHARACTERS = 1 << 16  # some milliseconds of work
# Positions with logprobs, each of 65 entries at most, that are written without a break.
MAX_POSITIONS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class LongList:
    """A JSON array whose items are made while they are written, once."""

    items: Iterable[object]
    has_long_items: bool = False  # items may hold a LongList


def as_json(told: object) -> bytes:
    """All of it at once; for what holds no LongList."""
    return _dumps(told).encode()


async def encoded(told: object) -> list[bytes]:
    """The same bytes as `as_json`, in slices."""
    slices: list[bytes] = []
    held: list[str] = []
    num_held = 0
    for text in _texts(told):
        held.append(text)
        num_held += len(text)
        if num_held >= SLICE_CHARACTERS:
            slices.append("".join(held).encode())
            held, num_held = [], 0
            await asyncio.sleep(0)
    return [*slices, "".join(held).encode()]


def _texts(told: object) -> Iterator[str]:
    match told:
        case LongList(items, has_long_items):
            yield "["
            for place, item in enumerate(items):
                if place:
                    yield ","
                if has_long_items:
                    yield from _texts(item)
                else:
                    yield _dumps(item)
            yield "]"
        case dict():
            yield "{"
            for place, (name, value) in enumerate(told.items()):
                yield f"{',' if place else ''}{_dumps(name)}:"
                yield from _texts(value)
            yield "}"
        case _:
            yield _dumps(told)


def _dumps(told: object) -> str:
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"))
