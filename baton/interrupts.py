"""Ctrl-C that waits for a good moment, and waits that Ctrl-C can break off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# A signal that comes in the instant before a wait begins does not end it, and Python runs its
# handler when the wait is over. So no wait is longer than this.
LOOK_EVERY_S = 0.1


def get_interruptibly(letters: SimpleQueue[T]) -> T:
    """The next letter; signals are heard meanwhile."""
    while True:
        with suppress(Empty):
            return letters.get(timeout=LOOK_EVERY_S)


@contextmanager
def ends_wait() -> Iterator[None]:
    """What would end this process within the block, by Ctrl-C or SIGTERM, does so at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread alone
        return
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], None]]:
    """Within the block, Ctrl-C takes effect where the yielded function is called.

    A step of the engine that is broken off in its middle cannot be gone on from. A second
    Ctrl-C takes effect at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # signals come to the main thread alone
        return
    was_pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    def check() -> None:
        if was_pressed:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
