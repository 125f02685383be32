"""gRPC servicer of the prefill node. Its calls end after their last KV write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.node.call_server import CallServer
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.prefill_node.sends import PendingSends
from baton.rpc.messages.calls import CallReport
from baton.rpc.messages.sequences import handoff_id_of
from baton.v1 import node_pb2, node_pb2_grpc

FINISHED_WITH_FIRST_TOKEN = (FinishReason.HANDED_OFF, FinishReason.STOP, FinishReason.LENGTH)


class PrefillServicer(node_pb2_grpc.PrefillServiceServicer):
    def __init__(
        self, state: NodeState, sends: PendingSends, tracing: NodeTracing = NO_TRACING
    ) -> None:
        self._sends = sends
        self._calls = CallServer(state, self._open_account, tracing)

    def Prefill(
        self,
        request_iterator: AsyncIterator[node_pb2.PrefillRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        return self._calls.serve(request_iterator, context)

    @contextmanager
    def _open_account(self, request: EngineRequest) -> Iterator[PrefillAccount]:
        with self._sends.expect_send(handoff_id_of(request.request_id)) as sent:
            yield PrefillAccount(request, sent)


@dataclass(frozen=True, slots=True)
class PrefillAccount:
    """Account of one prompt. `sent` is set after its last KV write."""

    request: EngineRequest
    sent: asyncio.Event

    def report(self, output: Output) -> CallReport | None:
        """Return the report with the last output, the only one with the engine's statistics."""
        if output.served is None:
            return None
        # If an answer is continued, cached tokens can extend past the prompt.
        num_cached = min(output.served.num_cached_tokens, len(self.request.prompt_token_ids))
        return CallReport(
            prompt_tokens_cached=num_cached, prompt_tokens_loaded=output.served.loaded_tokens
        )

    async def wait_for_end(self, reason: FinishReason | None) -> None:
        if self.request.send_to is not None and reason in FINISHED_WITH_FIRST_TOKEN:
            await self.sent.wait()
