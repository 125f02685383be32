"""Ctrl-C that waits for a good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


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
