"""gRPC servicer of the decode node: converts between messages and engine values."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from grpc import aio

from baton.core.output import RequestStats
from baton.node.call_streams import CallContext, serve_calls
from baton.node.observers.ledger import Entry, RequestLedger
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.rpc.messages.conversion import HANDOFF, output_to
from baton.rpc.messages.sequences import engine_request
from baton.rpc.status import named_errors
from baton.rpc.streaming import streamed
from baton.v1 import node_pb2, node_pb2_grpc


class DecodeServicer(node_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self,
        state: NodeState,
        ledger: RequestLedger,
        connect: Callable[[str], Awaitable[None]],
        tracing: NodeTracing = NO_TRACING,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._connect = connect
        self._tracing = tracing

    @streamed
    async def Decode(
        self,
        request_iterator: AsyncIterator[node_pb2.DecodeRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.DecodeResponse, None]:
        node_id = self._state.card.node_id
        calls = serve_calls(request_iterator, self._decode, self._state.count_call, node_id=node_id)
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield node_pb2.DecodeResponse(events=events)

    async def _decode(
        self, order: node_pb2.DecodeOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        spec = engine_request(order, time.monotonic())
        is_first = True
        with (
            self._tracing.record_call(
                context, HANDOFF.from_message(order.handoff_id), spec
            ) as timeline,
            self._ledger.open_entry(spec.request_id) as entry,
        ):
            async with aclosing(self._state.calls.stream_outputs(spec)) as outputs:
                async for output in outputs:
                    is_first_or_last = is_first or output.finish_reason is not None
                    if spec.kv_hints.prefetch and output.served is not None:
                        entry.num_cached_prompt_tokens = output.served.num_cached_tokens
                    if timeline is not None and is_first_or_last:
                        timeline.note_output(output)
                    summary = self._summary(entry, output.served) if is_first_or_last else None
                    yield node_pb2.CallEvent(output=output_to(output), summary=summary)
                    is_first = False

    async def Connect(
        self, request: node_pb2.ConnectRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ConnectResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            with self._state.count_call():
                await self._connect(request.prefill.address)
        return node_pb2.ConnectResponse()

    def _summary(self, entry: Entry, served: RequestStats | None) -> node_pb2.DecodeSummary:
        return node_pb2.DecodeSummary(
            kv_bytes=entry.num_received_bytes,
            kv_blocks=entry.num_received_blocks,
            kv_transport=self._state.card.kv_transport if entry.num_received_blocks else "",
            prompt_tokens_computed=entry.num_computed_prompt_tokens,
            prompt_tokens_cached=entry.num_cached_prompt_tokens,
            tokens_proposed=0 if served is None else served.num_proposed_tokens,
            tokens_accepted=0 if served is None else served.num_accepted_tokens,
            kv_conversion=entry.kv_conversion,
            prompt_tokens_loaded={} if served is None else served.loaded_tokens,
        )
