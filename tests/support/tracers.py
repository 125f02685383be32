"""Tracer that keeps its timelines for inspection."""

from __future__ import annotations

import asyncio
import queue

from baton.telemetry.tracing.outlet import Timeline
from baton.telemetry.tracing.spans import Span
from baton.telemetry.tracing.tracer import Tracer
from tests.support.traces import to_unix_ns


class TakingTracer(Tracer):
    """Enabled tracer that keeps all timelines."""

    def __init__(self) -> None:
        super().__init__()
        self._came: queue.SimpleQueue[Timeline] = queue.SimpleQueue()

    @property
    def is_on(self) -> bool:
        return True

    def take(self, timeline: Timeline) -> None:
        self._came.put(timeline)

    async def next_spans(self) -> list[Span]:
        """Wait for the next timeline and return its spans."""
        timeline = await asyncio.to_thread(self._came.get)
        return timeline.spans(to_unix_ns)
