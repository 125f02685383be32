"""Calls of routers to a node, the same for both roles: orders to requests, outputs to events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    aclosing,
    nullcontext,
)
from typing import Any

from grpc import aio

from baton.core.ids import HandoffId
from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.core.task import TaskOutput
from baton.node.call_streams import CallContext, serve_calls
from baton.node.observers.ledger import Entry, RequestLedger
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.rpc.messages.calls import CALL_MESSAGES, CallReport, Order, Request, engine_request
from baton.rpc.status import named_errors
from baton.v1 import node_pb2

# Yields an event that is set after the last KV write of a hand-off.
ExpectSend = Callable[[HandoffId], AbstractContextManager[asyncio.Event]]
ReportedOutput = tuple[Output, CallReport | None]
FINISHED_WITH_FIRST_TOKEN = (FinishReason.HANDED_OFF, FinishReason.STOP, FinishReason.LENGTH)


class CallServer:
    """Serves the calls of routers. Each is counted by the ledger until its end.

    With `expect_send`, as on prefill nodes, calls end after the last KV write of their hand-offs,
    and report only with their last output.
    """

    def __init__(
        self,
        state: NodeState,
        ledger: RequestLedger,
        tracing: NodeTracing = NO_TRACING,
        expect_send: ExpectSend | None = None,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._tracing = tracing
        self._expect_send = expect_send
        self._messages = CALL_MESSAGES[state.card.role]

    async def serve(
        self, requests: AsyncIterator[Request], context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[Any, None]:
        node_id = self._state.card.node_id
        calls = serve_calls(requests, self._serve_call, self._state.count_call, node_id=node_id)
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield self._messages.response(events=events)

    async def _serve_call(
        self, order: Order, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        request = engine_request(order, time.monotonic())
        async with aclosing(self.serve_request(request, context)) as outputs:
            async for output, report in outputs:
                yield self._messages.event_to(output, report)

    async def serve_request(
        self, request: EngineRequest, context: CallContext
    ) -> AsyncGenerator[ReportedOutput, None]:
        """Yield the outputs of a request, some with a report, and end after its last KV write.

        Closing the generator early aborts the request.
        """
        is_first, reason = True, None
        with (
            self._tracing.record_call(context, request) as timeline,
            self._ledger.open_entry(request.request_id) as entry,
            self._expecting_send(request) as sent,
        ):
            async with (
                self._holding_adapter(request),
                aclosing(self._state.calls.stream_outputs(request)) as outputs,
            ):
                async for output in outputs:
                    report, reason = None, output.finish_reason
                    # Not for the outputs in between, whose number is that of the tokens.
                    if is_first or reason is not None:
                        report = self._report(request, entry, output)
                        if timeline is not None:
                            timeline.note_output(output)
                    yield output, report
                    is_first = False
            if sent is not None and reason in FINISHED_WITH_FIRST_TOKEN:
                await sent.wait()

    def _holding_adapter(self, request: EngineRequest) -> AbstractAsyncContextManager[None]:
        adapters = self._state.adapters
        return nullcontext() if adapters is None else adapters.held(request.adapter)

    def _expecting_send(
        self, request: EngineRequest
    ) -> AbstractContextManager[asyncio.Event | None]:
        if self._expect_send is None or request.send_to is None:
            return nullcontext()
        return self._expect_send(request.send_to)

    def _report(self, request: EngineRequest, entry: Entry, output: Output) -> CallReport | None:
        """Return the report that goes with the first or the last output."""
        served = output.served
        if self._expect_send is not None and served is None:
            return None
        num_cached = entry.num_cached_prompt_tokens
        if request.task.output is TaskOutput.KV and served is not None:
            num_cached = served.num_cached_tokens  # it never runs, so the ledger has no count
        return CallReport(
            kv_bytes=entry.num_received_bytes,
            kv_blocks=entry.num_received_blocks,
            kv_transport=self._state.card.kv_transport if entry.num_received_blocks else "",
            prompt_tokens_computed=entry.num_computed_prompt_tokens,
            prompt_tokens_cached=num_cached,
            tokens_proposed=0 if served is None else served.num_proposed_tokens,
            tokens_accepted=0 if served is None else served.num_accepted_tokens,
            kv_conversion=entry.kv_conversion,
            prompt_tokens_loaded={} if served is None else served.loaded_tokens,
        )
