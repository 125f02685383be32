"""Deferred Ctrl-C, and waits that Ctrl-C can interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

# Maximum length of one wait. A signal that arrives just before a wait does not end it, and Python
# runs its handler only after the wait.
LOOK_EVERY_S = 0.1


def get_interruptibly(queue: SimpleQueue[T]) -> T:
    """Return the next item of the queue; signals are handled while waiting."""
    while True:
        with suppress(Empty):
            return queue.get(timeout=LOOK_EVERY_S)


@contextmanager
def defer_interrupts() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C within the block to the next call of the yielded function.

    An engine step that is interrupted halfway leaves the engine in an undefined state. A second
    Ctrl-C takes effect at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None  # only the main thread receives signals
        return
    was_pressed = False

    def note_interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_pressed
        if was_pressed:
            raise KeyboardInterrupt
        was_pressed = True

    def raise_if_pressed() -> None:
        if was_pressed:
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, handler)
