"""Calls of routers to a node: orders to requests, outputs to events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass
from typing import Any

from grpc import aio

from baton.core.legs import LegKind
from baton.core.output import Output
from baton.core.request import EngineRequest
from baton.core.task import TaskOutput
from baton.node.call_streams import CallContext, serve_calls
from baton.node.observers.ledger import Entry, RequestLedger
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.prefill_node.leg import PrefillLegs
from baton.rpc.messages.calls import CallReport, engine_request, event_to
from baton.rpc.status import named_errors
from baton.v1 import node_pb2


@dataclass(frozen=True, slots=True, eq=False)
class CallServer:
    """Serves legs. Each is counted by the ledger until its end.

    Those that send KV end after the last write, and report only with their last output.
    """

    state: NodeState
    ledger: RequestLedger
    prefills: PrefillLegs
    tracing: NodeTracing = NO_TRACING

    async def serve(
        self, requests: AsyncIterator[node_pb2.ServeRequest], context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.ServeResponse, None]:
        node_id = self.state.card.node_id
        calls = serve_calls(requests, self._serve_call, self.state.serving_leg, node_id=node_id)
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield node_pb2.ServeResponse(events=events)

    async def _serve_call(
        self, kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        """Yield an event for each output, some with a report, and end after the last KV write.

        Closing the generator early aborts the request.
        """
        request = engine_request(order, time.monotonic())
        is_first, reason = True, None
        with (
            self.tracing.record_call(context, kind, request) as timeline,
            self.ledger.open_entry(request.request_id) as entry,
            self.prefills.sending(request.send_to),
        ):
            async with (
                self._holding_adapter(request),
                aclosing(self.state.calls.stream_outputs(request)) as outputs,
            ):
                async for output in outputs:
                    report, reason = None, output.finish_reason
                    # Not for the outputs in between, whose number is that of the tokens.
                    if is_first or reason is not None:
                        report = self._report(request, entry, output)
                        if timeline is not None:
                            timeline.note_output(output)
                    yield event_to(output, report)
                    is_first = False
            if request.send_to is not None:
                await self.prefills.until_sent(request.send_to, reason)

    def _holding_adapter(self, request: EngineRequest) -> AbstractAsyncContextManager[None]:
        adapters = self.state.adapters
        return nullcontext() if adapters is None else adapters.held(request.adapter)

    def _report(self, request: EngineRequest, entry: Entry, output: Output) -> CallReport | None:
        """Return the report that goes with the first or the last output."""
        served = output.served
        if request.send_to is not None and served is None:
            return None
        num_cached = entry.num_cached_prompt_tokens
        if request.task.output is TaskOutput.KV and served is not None:
            num_cached = served.num_cached_tokens  # it never runs, so the ledger has no count
        return CallReport(
            kv_bytes=entry.num_received_bytes,
            kv_blocks=entry.num_received_blocks,
            kv_transport=self.state.card.kv_transport if entry.num_received_blocks else "",
            prompt_tokens_computed=entry.num_computed_prompt_tokens,
            prompt_tokens_cached=num_cached,
            tokens_proposed=0 if served is None else served.num_proposed_tokens,
            tokens_accepted=0 if served is None else served.num_accepted_tokens,
            kv_conversion=entry.kv_conversion,
            prompt_tokens_loaded={} if served is None else served.loaded_tokens,
        )
