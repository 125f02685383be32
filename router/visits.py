"""A request at the router's door: what gRPC and HTTP do alike around the pipeline."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from router.context import RequestContext
from router.pipeline import Pipeline
from router.salts import own_salt, owner_of
from router.shared_prompt import SharedPrompt
from router.sizes import LogprobBudget
from router.tracing import TRACES_NOTHING, Tracing
from router.values import Call, Ending, Piece
from telemetry import names
from telemetry.tracer import Received

Parts = AsyncGenerator[Piece | Ending, None]
Answering = AbstractAsyncContextManager[Parts]


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
    def deadline_s(self) -> float | None:
        return self._context.deadline_s

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
        self,
        call: Call,
        is_late: Callable[[], bool] = _never,
        shared: SharedPrompt | None = None,
        budget: LogprobBudget | None = None,
    ) -> AsyncIterator[Parts]:
        """The answer; the request ends with the block."""
        with self._trace.ending(is_late):
            self._trace.asked(call)
            call = replace(call, cache_salt=own_salt(call.cache_salt, self.owner))
            context = replace(self._context, shared=shared, logprob_budget=budget)
            async with aclosing(self._pipeline.generate(call, context)) as parts:
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

    def answering(
        self,
        visit: Visit,
        calls: Sequence[Call],
        num_each: int,
        is_late: Callable[[], bool] = _never,
    ) -> list[Answering]:
        """An answer to each call. Every `num_each` in a row have their prompt in common.

        The first one is the visit's; the others hang under its trace.
        """
        visits = [visit, *(self._beside(visit, call.request_id) for call in calls[1:])]
        num_prompts = len(calls) // num_each
        shared = [SharedPrompt(num_each) if num_each > 1 else None for _ in range(num_prompts)]
        budget = LogprobBudget()
        return [
            one.answering(call, is_late, shared[place // num_each], budget)
            for place, (one, call) in enumerate(zip(visits, calls, strict=True))
        ]

    def _beside(self, visit: Visit, request_id: str) -> Visit:
        metadata = [(names.TRACEPARENT, visit.traceparent)]
        context = replace(received_now(), deadline_s=visit.deadline_s)
        return self._begin(request_id, metadata, context, visit.owner)

    def _begin(
        self, request_id: str, metadata: Received | None, context: RequestContext, owner: str
    ) -> Visit:
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        return Visit(self._pipeline, replace(context, trace=trace), owner)


def received_now(remaining_s: float | None = None) -> RequestContext:
    """Clients tell how long they wait; the pipeline counts on its own clock."""
    now = time.monotonic()
    return RequestContext(now, None if remaining_s is None else now + remaining_s)
