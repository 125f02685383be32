"""Calls of routers to a node, the same for both roles: orders to requests, outputs to events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, Protocol

from grpc import aio

from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.node.call_streams import CallContext, serve_calls
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.rpc.messages.calls import CALL_MESSAGES, CallReport, Request
from baton.rpc.messages.sequences import Order, engine_request
from baton.rpc.status import named_errors
from baton.v1 import node_pb2


class CallAccount(Protocol):
    """Account of one call, in which the roles differ."""

    def report(self, output: Output) -> CallReport | None:
        """Return the report that goes with the first or the last output."""
        ...

    async def wait_for_end(self, reason: FinishReason | None) -> None:
        """Return when the call can end, after its last output."""
        ...


OpenAccount = Callable[[EngineRequest], AbstractContextManager[CallAccount]]


class CallServer:
    """Serves the calls of routers. `open_account` is entered for each call until its end."""

    def __init__(
        self, state: NodeState, open_account: OpenAccount, tracing: NodeTracing = NO_TRACING
    ) -> None:
        self._state = state
        self._open_account = open_account
        self._tracing = tracing
        self._messages = CALL_MESSAGES[state.card.role]

    async def serve(
        self, requests: AsyncIterator[Request], context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        """Yield the responses to one stream of calls."""
        node_id = self._state.card.node_id
        calls = serve_calls(requests, self._serve_call, self._state.count_call, node_id=node_id)
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield self._messages.response(events=events)

    async def _serve_call(
        self, order: Order, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        request = engine_request(order, time.monotonic())
        is_first, reason = True, None
        with (
            self._tracing.record_call(context, request) as timeline,
            self._open_account(request) as account,
        ):
            async with aclosing(self._state.calls.stream_outputs(request)) as outputs:
                async for output in outputs:
                    report, reason = None, output.finish_reason
                    # Not for the outputs in between, whose number is that of the tokens.
                    if is_first or reason is not None:
                        report = account.report(output)
                        if timeline is not None:
                            timeline.note_output(output)
                    yield self._messages.event_to(output, report)
                    is_first = False
            await account.wait_for_end(reason)
