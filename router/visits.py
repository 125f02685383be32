"""A request at the router's door: what gRPC and HTTP do alike around the pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from router.context import RequestContext
from router.pipeline import Pipeline
from router.salts import own_salt, owner_of
from router.tracing import TRACES_NOTHING, Tracing
from router.values import Call, Ending, Piece
from telemetry import names
from telemetry.tracer import Received

Parts = AsyncGenerator[Piece | Ending, None]


def _never() -> bool:
    return False


class Visit:
    """One request, from its first byte to its end: all of it is traced and counted, once."""

    def __init__(self, pipeline: Pipeline, context: RequestContext, owner: str) -> None:
        self.owner = owner  # empty where clients are not told apart
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
            call = replace(call, cache_salt=own_salt(call.cache_salt, self.owner))
            async with aclosing(self._pipeline.generate(call, self._context)) as parts:
                yield parts


class Visits:
    """With `by_token`, clients are who their tokens say they are: a salt is its client's own."""

    def __init__(
        self, pipeline: Pipeline, tracing: Tracing = TRACES_NOTHING, *, by_token: bool = False
    ) -> None:
        self._pipeline = pipeline
        self._tracing = tracing
        self._by_token = by_token

    def begin(self, request_id: str, metadata: Received | None, context: RequestContext) -> Visit:
        owner = owner_of(metadata) if self._by_token and metadata is not None else ""
        return self._begin(request_id, metadata, context, owner)

    def beside(self, visit: Visit, request_id: str) -> Visit:
        """More of what the same client asked for, under its trace."""
        metadata = [(names.TRACEPARENT, visit.traceparent)]
        return self._begin(request_id, metadata, received_now(), visit.owner)

    def _begin(
        self, request_id: str, metadata: Received | None, context: RequestContext, owner: str
    ) -> Visit:
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        return Visit(self._pipeline, replace(context, trace=trace), owner)


def received_now(remaining_s: float | None = None) -> RequestContext:
    """Clients tell how long they wait; the pipeline counts on its own clock."""
    now = time.monotonic()
    return RequestContext(now, None if remaining_s is None else now + remaining_s)
