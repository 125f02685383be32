"""JSON of responses and events. Large ones are encoded in slices, with the event loop between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SLICE_CHARACTERS = 1 << 16  # takes a few milliseconds to encode


@dataclass(frozen=True, slots=True)
class LazyArray:
    """JSON array whose items are created lazily while it is encoded, once."""

    items: Iterable[object]
    has_long_items: bool = False  # items may hold a LazyArray


def as_json(value: object) -> bytes:
    """Encode at once a value that contains no LazyArray."""
    return _dumps(value).encode()


def server_sent_event(message: Json) -> bytes:
    return b"data: " + as_json(message) + b"\n\n"


def named_event(message: Json) -> bytes:
    """Return an event that has the message's `type` as its name, too."""
    return f"event: {message['type']}\n".encode() + server_sent_event(message)


async def encode_in_slices(value: object) -> list[bytes]:
    """Encode in slices that join to the bytes of `as_json`."""
    slices: list[bytes] = []
    held: list[str] = []
    num_held = 0
    for text in _fragments(value):
        held.append(text)
        num_held += len(text)
        if num_held >= SLICE_CHARACTERS:
            slices.append("".join(held).encode())
            held, num_held = [], 0
            await asyncio.sleep(0)
    return [*slices, "".join(held).encode()]


def _fragments(value: object) -> Iterator[str]:
    match value:
        case LazyArray(items, has_long_items):
            yield "["
            for index, item in enumerate(items):
                if index:
                    yield ","
                if has_long_items:
                    yield from _fragments(item)
                else:
                    yield _dumps(item)
            yield "]"
        case dict():
            yield "{"
            for index, (name, item) in enumerate(value.items()):
                yield f"{',' if index else ''}{_dumps(name)}:"
                yield from _fragments(item)
            yield "}"
        case _:
            yield _dumps(value)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
