"""Waits for a state that no event reports. Each has an end, and fails with the last value seen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from threading import Event
from typing import TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0  # only a failing test waits so long
PAUSE_S = 0.002


def pause() -> None:
    Event().wait(PAUSE_S)


def await_value(
    read: Callable[[], T],
    is_wanted: Callable[[T], bool] = bool,
    *,
    turn: Callable[[], object] = pause,
    what: str = "",
) -> T:
    """Read until a value is wanted, and return it. Between two reads, call `turn`."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_wanted(value := read()):
        _check(until_s, value, what)
        turn()
    return value


async def until(
    read: Callable[[], T], is_wanted: Callable[[T], bool] = bool, *, what: str = ""
) -> T:
    """`await_value` in an event loop, which others may use meanwhile."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_wanted(value := read()):
        _check(until_s, value, what)
        await asyncio.sleep(PAUSE_S)
    return value


async def until_answer(
    ask: Callable[[], Awaitable[T]], is_wanted: Callable[[T], bool], *, what: str = ""
) -> T:
    """Ask until an answer is wanted, and return it."""
    until_s = time.monotonic() + PATIENCE_S
    while not is_wanted(value := await ask()):
        _check(until_s, value, what)
    return value


def reaches(wanted: int) -> Callable[[int], bool]:
    return lambda value: value >= wanted


def _check(until_s: float, value: object, what: str) -> None:
    if time.monotonic() > until_s:
        wanted = f"{what}: " if what else ""
        raise AssertionError(f"{wanted}not within {PATIENCE_S:g} s. Last value seen: {value!r}")
