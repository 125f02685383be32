"""Takes what was traced out of the process on a thread of its own, and never holds anyone up."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from telemetry.spans import Span, ToUnixNs

MAX_WAITING = 2048  # timelines; more are dropped and counted
MAX_BATCH = 64
GATHER_S = 0.2  # what comes closer together goes out as one batch
TOLD_EVERY_S = 60.0
LONGEST_END_S = 3.0

Export = Callable[[Sequence[Span]], None]

log = logging.getLogger(__name__)


class Timeline(Protocol):
    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]: ...


class ExportFailed(Exception):
    """The batch did not get through; the next one may."""


class Outlet:
    """One way out, from `with` to the end of the block; what waits then still goes out."""

    def __init__(self, name: str, export: Export, to_unix_ns: ToUnixNs) -> None:
        self._name = name
        self._export = export
        self._to_unix_ns = to_unix_ns
        self._waiting: deque[Timeline] = deque()
        self._changed = threading.Condition()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=f"traces to {name}", daemon=True)
        self._told_s = float("-inf")
        self.num_dropped = 0  # for want of room
        self.num_failed = 0  # of what was sent

    def __enter__(self) -> Outlet:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(LONGEST_END_S)  # a peer that does not answer shall not keep us

    def take(self, timeline: Timeline) -> None:
        """From any thread; returns at once."""
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self.num_dropped += 1
                return
            self._waiting.append(timeline)
            if len(self._waiting) == 1:
                self._changed.notify()

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._export([span for one in batch for span in one.spans(self._to_unix_ns)])
            except (ExportFailed, OSError) as error:
                self._note_failure(len(batch), error)

    def _next_batch(self) -> list[Timeline]:
        """Empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            self._changed.wait_for(lambda: self._is_ending, GATHER_S)
            num = min(len(self._waiting), MAX_BATCH)
            return [self._waiting.popleft() for _ in range(num)]

    def _note_failure(self, num_lost: int, error: Exception) -> None:
        self.num_failed += num_lost
        now_s = time.monotonic()
        if now_s >= self._told_s + TOLD_EVERY_S:
            self._told_s = now_s
            log.warning("%d traces were lost on their way to %s: %s", num_lost, self._name, error)
