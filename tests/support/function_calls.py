"""Counts function calls, as a measure of work that other load does not distort."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(action: Callable[[], None]) -> int:
    """Return the number of functions that the action calls, including built-in ones."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # it would call finalizers of other tests' objects
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count
