"""Typed fields of the JSON objects of a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.replay.formats.source import InvalidTrace

MAX_TOKENS = 1 << 31


def parse_object(where: str, text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidTrace with the line of the error."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidTrace(f"{where}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise InvalidTrace(f"{where}: expected a JSON object, got {type(values).__name__}")
    return values


def number_of(where: str, values: Mapping[str, Any], name: str) -> float:
    """Return a finite number of at least 0. Raises InvalidTrace."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidTrace(f"{where}: {name} is {value!r}; expected a number")
    if not math.isfinite(value) or value < 0:
        raise InvalidTrace(f"{where}: {name} is {value!r}; expected a number from 0 on")
    return value


def tokens_of(where: str, values: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens. Raises InvalidTrace."""
    value = number_of(where, values, name)
    if value != int(value) or value > MAX_TOKENS:
        raise InvalidTrace(f"{where}: {name} is {value!r}; expected a number of tokens")
    return int(value)


def block_names_of(
    where: str, values: Mapping[str, Any], num_tokens: int, block_tokens: int, scope: str = ""
) -> tuple[str, ...]:
    """Return the names of the prompt's whole blocks. Raises InvalidTrace.

    The block at the end of a prompt, which is not whole, may have an id or not.
    """
    ids = values.get("hash_ids", ())
    if not isinstance(ids, list | tuple) or not all(isinstance(one, int | str) for one in ids):
        raise InvalidTrace(f"{where}: hash_ids must be a list of numbers")
    most = -(-num_tokens // block_tokens)
    if len(ids) > most:
        raise InvalidTrace(
            f"{where}: {len(ids)} hash_ids for {num_tokens} tokens; "
            f"at most {most} blocks of {block_tokens} are possible"
        )
    return tuple(f"{scope}{one}" for one in ids[: num_tokens // block_tokens])
