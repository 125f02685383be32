"""Answers scrapes where the answer can be had without a race."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from telemetry import metric_names as counted
from telemetry.metrics import Read, Reading

LONGEST_WAIT_S = 1.0

Post = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class Known:
    """What was read, and when."""

    reading: Reading
    at_s: float


class AskedOn:
    """Reads on the thread that owns what is read; while that has no time, what was read last."""

    def __init__(self, post: Post, read: Read, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._post = post
        self._read = read
        self._longest_wait_s = longest_wait_s
        self._asked: Future[Known] = Future()
        self._asked.set_result(Known({}, 0.0))
        self._known: Known | None = None

    def __call__(self) -> Reading:
        """From any thread. Empty when nothing was read yet."""
        asked = self._asked
        if asked.done():  # else the owner has yet to come to it
            asked = self._asked = Future()
            self._post(partial(self._answer, asked))
        try:
            return {**asked.result(self._longest_wait_s).reading, counted.READINGS_AGE: 0.0}
        except TimeoutError:
            known = self._known
        if known is None:
            return {}
        return {**known.reading, counted.READINGS_AGE: time.monotonic() - known.at_s}

    def _answer(self, asked: Future[Known]) -> None:
        self._known = Known(self._read(), time.monotonic())
        asked.set_result(self._known)
