"""Export queue for timelines, emptied by a thread of its own. Producers never block."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.telemetry.tracing.spans import Span, ToUnixNs

MAX_WAITING = 2048  # timelines; more are dropped and counted
MAX_BATCH = 64
BATCHING_S = 0.2
WARNING_INTERVAL_S = 60.0
MAX_CLOSE_S = 3.0

Export = Callable[[Sequence[Span]], None]

log = logging.getLogger(__name__)


class Timeline(Protocol):
    def spans(self, to_unix_ns: ToUnixNs) -> list[Span]: ...


class ExportFailed(Exception):
    """The batch was not delivered; the next one may be."""


class BatchExporter:
    """Bounded queue to one exporter. At the end of the block, waiting timelines are exported."""

    def __init__(self, name: str, export: Export, to_unix_ns: ToUnixNs) -> None:
        self._name = name
        self._export = export
        self._to_unix_ns = to_unix_ns
        self._waiting: deque[Timeline] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"traces to {name}", daemon=True)
        self._warned_s: float | None = None
        self.num_dropped = 0
        self.num_failed = 0

    def __enter__(self) -> BatchExporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(MAX_CLOSE_S)  # bounded: the collector may not respond

    def take(self, timeline: Timeline) -> None:
        """Queue a timeline. Thread-safe, does not block."""
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
                self._export(
                    [span for timeline in batch for span in timeline.spans(self._to_unix_ns)]
                )
            except (ExportFailed, OSError) as error:
                self._note_failure(len(batch), error)

    def _next_batch(self) -> list[Timeline]:
        """Wait for a batch. It is empty when the queue is closed and drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            self._changed.wait_for(lambda: self._is_closing, BATCHING_S)
            num = min(len(self._waiting), MAX_BATCH)
            return [self._waiting.popleft() for _ in range(num)]

    def _note_failure(self, num_lost: int, error: Exception) -> None:
        self.num_failed += num_lost
        now_s = time.monotonic()
        if self._warned_s is None or now_s >= self._warned_s + WARNING_INTERVAL_S:
            self._warned_s = now_s
            log.warning("%d traces could not be exported to %s: %s", num_lost, self._name, error)
