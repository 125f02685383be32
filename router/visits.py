"""A request at the router's door: what gRPC and HTTP do alike around the pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from router.context import RequestContext
from router.pipeline import Pipeline
from router.tracing import TRACES_NOTHING, Tracing
from router.values import Call, Ending, Piece
from telemetry.tracer import Received

Parts = AsyncGenerator[Piece | Ending, None]


def _never() -> bool:
    return False


class Visit:
    """One request, from its first byte to its end: all of it is traced and counted, once."""

    def __init__(self, pipeline: Pipeline, context: RequestContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._trace = context.trace

    @property
    def trace_id(self) -> str:
        """Empty if it is not traced."""
        return self._trace.trace_id

    @property
    def traceparent(self) -> str:
        """Under which more of the same request's work may hang; empty if there is none."""
        return self._trace.traceparent

    @contextmanager
    def before_the_call(self, is_late: Callable[[], bool] = _never) -> Iterator[None]:
        """What cannot be read ends the request here."""
        try:
            yield
        except BaseException:
            with self._trace.ending(is_late):
                raise

    @asynccontextmanager
    async def answering(
        self, call: Call, is_late: Callable[[], bool] = _never
    ) -> AsyncIterator[Parts]:
        """The answer; the request ends with the block."""
        with self._trace.ending(is_late):
            self._trace.asked(call)
            async with aclosing(self._pipeline.generate(call, self._context)) as parts:
                yield parts


class Visits:
    def __init__(self, pipeline: Pipeline, tracing: Tracing = TRACES_NOTHING) -> None:
        self._pipeline = pipeline
        self._tracing = tracing

    def begin(self, request_id: str, metadata: Received | None, context: RequestContext) -> Visit:
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        return Visit(self._pipeline, replace(context, trace=trace))


def received_now(remaining_s: float | None = None) -> RequestContext:
    """Clients tell how long they wait; the pipeline counts on its own clock."""
    now = time.monotonic()
    return RequestContext(now, None if remaining_s is None else now + remaining_s)
