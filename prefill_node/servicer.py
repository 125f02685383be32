"""gRPC servicer of the prefill node: converts between messages and engine values."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from grpc import aio

from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.node.call_streams import CallContext, serve_calls
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.prefill_node.sends import PendingSends
from baton.rpc.messages.conversion import HANDOFF, output_to
from baton.rpc.messages.sequences import engine_request
from baton.rpc.status import named_errors
from baton.rpc.streaming import streamed
from baton.v1 import node_pb2, node_pb2_grpc

FINISHED_WITH_FIRST_TOKEN = (FinishReason.HANDED_OFF, FinishReason.STOP, FinishReason.LENGTH)


class PrefillServicer(node_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self, state: NodeState, sends: PendingSends, tracing: NodeTracing = NO_TRACING
    ) -> None:
        self._state = state
        self._sends = sends
        self._tracing = tracing

    @streamed
    async def Prefill(
        self,
        request_iterator: AsyncIterator[node_pb2.PrefillRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        node_id = self._state.card.node_id
        calls = serve_calls(
            request_iterator, self._prefill, self._state.count_call, node_id=node_id
        )
        async with named_errors(context, node_id=node_id), aclosing(calls):
            async for events in calls:
                yield node_pb2.PrefillResponse(events=events)

    async def _prefill(
        self, order: node_pb2.PrefillOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        """Yield the first token. The call ends after the last KV write."""
        spec = engine_request(order, time.monotonic())
        handoff_id = HANDOFF.from_message(order.handoff_id)
        with (
            self._tracing.record_call(context, handoff_id, spec) as timeline,
            self._sends.expect_send(handoff_id) as sent,
        ):
            reason = None
            async with aclosing(self._state.calls.stream_outputs(spec)) as outputs:
                async for output in outputs:
                    reason = output.finish_reason
                    if timeline is not None:
                        timeline.note_output(output)
                    yield node_pb2.CallEvent(
                        output=output_to(output), prefill_summary=_summary(spec, output)
                    )
            if spec.send_to is not None and reason in FINISHED_WITH_FIRST_TOKEN:
                await sent.wait()


def _summary(spec: EngineRequest, output: Output) -> node_pb2.PrefillSummary | None:
    """Return the summary of the last output, the only one with the engine's statistics."""
    if output.served is None:
        return None
    # If an answer is continued, cached tokens can extend past the prompt.
    num_cached = min(output.served.num_cached_tokens, len(spec.prompt_token_ids))
    return node_pb2.PrefillSummary(
        prompt_tokens_cached=num_cached, prompt_tokens_loaded=output.served.loaded_tokens
    )
