"""Reads metrics on the thread that owns their state, to avoid races."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import Read, Reading

LONGEST_WAIT_S = 1.0

Post = Callable[[Callable[[], None]], object]


KnownReading = tuple[Reading, float]  # and its time


class OwnerThreadReader:
    """Reads on the owner's thread. If that thread is busy, returns the last reading."""

    def __init__(self, post: Post, read: Read, longest_wait_s: float = LONGEST_WAIT_S) -> None:
        self._post = post
        self._read = read
        self._longest_wait_s = longest_wait_s
        self._pending: Future[KnownReading] = Future()
        self._pending.set_result(({}, 0.0))
        self._known: KnownReading | None = None

    def __call__(self) -> Reading:
        """Return a reading. Callable from any thread. Empty if there is no reading yet."""
        pending = self._pending
        if pending.done():  # else the last request is still queued at the owner
            pending = self._pending = Future()
            self._post(partial(self._answer, pending))
        try:
            reading, _ = pending.result(self._longest_wait_s)
            return {**reading, counted.READINGS_AGE: 0.0}
        except TimeoutError:
            known = self._known
        if known is None:
            return {}
        reading, at_s = known
        return {**reading, counted.READINGS_AGE: time.monotonic() - at_s}

    def _answer(self, pending: Future[KnownReading]) -> None:
        self._known = self._read(), time.monotonic()
        pending.set_result(self._known)
