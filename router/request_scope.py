"""Scope of a request from its arrival to its end, for gRPC and HTTP: trace, metrics, salts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from router.context import RequestContext
from router.input_processing.cache_salts import bind_salt, token_digest
from router.tracing import NO_REQUEST_TRACING, Tracing
from router.values import GenerateCall
from telemetry import names
from telemetry.tracing.tracer import Received


def never_late() -> bool:
    return False


class RequestScope:
    """Scope of one answer; traces and counts it once."""

    def __init__(self, tracing: Tracing, context: RequestContext, owner: str) -> None:
        self.context = context
        self._tracing = tracing
        self._trace = context.trace
        self._owner = owner  # empty without authentication

    @property
    def trace_id(self) -> str:
        """Empty if the request is not traced."""
        return self._trace.trace_id

    @contextmanager
    def ending_on_error(self, is_late: Callable[[], bool] = never_late) -> Iterator[None]:
        """End the request's trace if the block, which parses the request, raises."""
        try:
            yield
        except BaseException:
            with self._trace.ending(is_late):
                raise

    @contextmanager
    def answering(self, call: GenerateCall, is_late: Callable[[], bool]) -> Iterator[GenerateCall]:
        """Yield the call with its salt bound to the client. The request ends with the block."""
        with self._trace.ending(is_late):
            self._trace.note_call(call)
            yield replace(call, cache_salt=bind_salt(call.cache_salt, self._owner))

    def begin_child(self, request_id: str) -> RequestScope:
        """Begin the scope of another answer to the same client request, in the same trace."""
        metadata = [(names.TRACEPARENT, self._trace.traceparent)]
        context = new_request_context()
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        context = replace(context, deadline_s=self.context.deadline_s, trace=trace)
        return RequestScope(self._tracing, context, self._owner)


class RequestScopes:
    """Creates the scopes of requests.

    With `by_token`, cache salts are bound to the client's token, so tenants never share KV.
    """

    def __init__(self, tracing: Tracing = NO_REQUEST_TRACING, *, by_token: bool = False) -> None:
        self._tracing = tracing
        self._by_token = by_token

    def begin(
        self, request_id: str, metadata: Received | None, context: RequestContext
    ) -> RequestScope:
        owner = token_digest(metadata) if self._by_token and metadata is not None else ""
        trace = self._tracing.begin(metadata, request_id, context.received_s)
        return RequestScope(self._tracing, replace(context, trace=trace), owner)


def new_request_context(remaining_s: float | None = None) -> RequestContext:
    """Return the context of a request that arrives now, its deadline on the pipeline's clock."""
    now = time.monotonic()
    return RequestContext(now, None if remaining_s is None else now + remaining_s)
