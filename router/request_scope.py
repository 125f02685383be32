"""Scope of a request around the pipeline, shared by gRPC and HTTP: tracing, metrics, salts."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

from router.context import RequestContext
from router.input_processing.cache_salts import bind_salt, token_digest
from router.input_processing.logprob_limits import LogprobBudget
from router.pipeline import Pipeline
from router.shared_prompt import SharedPrompt
from router.tracing import NO_REQUEST_TRACING, Tracing
from router.values import CompletionSummary, GenerateCall, TokenChunk
from telemetry import names
from telemetry.tracing.tracer import Received

Parts = AsyncGenerator[TokenChunk | CompletionSummary, None]
Answering = AbstractAsyncContextManager[Parts]


def _never() -> bool:
    return False


class RequestScope:
    """Scope of one request from its arrival to its end; traces and counts it once."""

    def __init__(self, pipeline: Pipeline, context: RequestContext, owner: str) -> None:
        self.owner = owner  # empty without authentication
        self._pipeline = pipeline
        self._context = context
        self._trace = context.trace

    @property
    def trace_id(self) -> str:
        """Empty if the request is not traced."""
        return self._trace.trace_id

    @property
    def deadline_s(self) -> float | None:
        return self._context.deadline_s

    @property
    def traceparent(self) -> str:
        """Parent context for further work of this request; empty if it is not traced."""
        return self._trace.traceparent

    @contextmanager
    def ending_on_error(self, is_late: Callable[[], bool] = _never) -> Iterator[None]:
        """End the request's trace if the block, which parses the request, raises."""
        try:
            yield
        except BaseException:
            with self._trace.ending(is_late):
                raise

    @asynccontextmanager
    async def answering(
        self,
        call: GenerateCall,
        is_late: Callable[[], bool] = _never,
        shared: SharedPrompt | None = None,
        budget: LogprobBudget | None = None,
    ) -> AsyncIterator[Parts]:
        """Yield the parts of the answer. The request ends with the block."""
        with self._trace.ending(is_late):
            self._trace.note_call(call)
            call = replace(call, cache_salt=bind_salt(call.cache_salt, self.owner))
            context = replace(self._context, shared=shared, logprob_budget=budget)
            async with aclosing(self._pipeline.generate(call, context)) as parts:
                yield parts


class RequestScopes:
    """Creates the scopes of requests.

    With `by_token`, cache salts are bound to the client's token, so tenants never share KV.
    """

    def __init__(
        self, pipeline: Pipeline, tracing: Tracing = NO_REQUEST_TRACING, *, by_token: bool = False
    ) -> None:
        self._pipeline = pipeline
        self._tracing = tracing
        self._by_token = by_token

    def begin(
        self, request_id: str, metadata: Received | None, context: RequestContext
    ) -> RequestScope:
        owner = token_digest(metadata) if self._by_token and metadata is not None else ""
        return self._begin(request_id, metadata, context, owner)

    def answering(
        self,
        visit: RequestScope,
        calls: Sequence[GenerateCall],
        num_each: int,
        is_late: Callable[[], bool] = _never,
    ) -> list[Answering]:
        """Return one answer per call. Each `num_each` consecutive calls have the same prompt.

        The first call uses `visit`; the others get child scopes in the same trace.
        """
        visits = [visit, *(self._begin_child(visit, call.request_id) for call in calls[1:])]
        num_prompts = len(calls) // num_each
        shared = [SharedPrompt() if num_each > 1 else None for _ in range(num_prompts)]
        budget = LogprobBudget(num_each)
        return [
            scope.answering(call, is_late, shared[place // num_each], budget)
            for place, (scope, call) in enumerate(zip(visits, calls, strict=True))
        ]

    def _begin_child(self, visit: RequestScope, request_id: str) -> RequestScope:
        metadata = [(names.TRACEPARENT, visit.traceparent)]
        context = replace(new_request_context(), deadline_s=visit.deadline_s)
        return self._begin(request_id, metadata, context, visit.owner)

    def _begin(
        self, request_id: str, metadata: Received | None, context: RequestContext, owner: str
    ) -> RequestScope:
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        return RequestScope(self._pipeline, replace(context, trace=trace), owner)


def new_request_context(remaining_s: float | None = None) -> RequestContext:
    """Return the context of a request that arrives now, its deadline on the pipeline's clock."""
    now = time.monotonic()
    return RequestContext(now, None if remaining_s is None else now + remaining_s)
