"""gRPC servicer of the decode node. Its calls report what the node received and computed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpc import aio

from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest
from baton.core.task import TaskOutput
from baton.node.call_server import CallServer
from baton.node.observers.ledger import Entry, RequestLedger
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.state import NodeState
from baton.rpc.messages.calls import CallReport
from baton.rpc.status import named_errors
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
        self._calls = CallServer(state, self._open_account, tracing)

    def Decode(
        self,
        request_iterator: AsyncIterator[node_pb2.DecodeRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.DecodeResponse, None]:
        return self._calls.serve(request_iterator, context)

    async def Connect(
        self, request: node_pb2.ConnectRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ConnectResponse:
        async with named_errors(context, node_id=self._state.card.node_id):
            with self._state.count_call():
                await self._connect(request.prefill.address)
        return node_pb2.ConnectResponse()

    @contextmanager
    def _open_account(self, request: EngineRequest) -> Iterator[DecodeAccount]:
        with self._ledger.open_entry(request.request_id) as entry:
            yield DecodeAccount(request, entry, self._state.card.kv_transport)


@dataclass(frozen=True, slots=True)
class DecodeAccount:
    """Account of one sequence, kept by the ledger while the engine runs it."""

    request: EngineRequest
    entry: Entry
    kv_transport: str

    def report(self, output: Output) -> CallReport:
        entry, served = self.entry, output.served
        num_cached = entry.num_cached_prompt_tokens
        if self.request.task.output is TaskOutput.KV and served is not None:
            num_cached = served.num_cached_tokens  # it never runs, so the ledger has no count
        return CallReport(
            kv_bytes=entry.num_received_bytes,
            kv_blocks=entry.num_received_blocks,
            kv_transport=self.kv_transport if entry.num_received_blocks else "",
            prompt_tokens_computed=entry.num_computed_prompt_tokens,
            prompt_tokens_cached=num_cached,
            tokens_proposed=0 if served is None else served.num_proposed_tokens,
            tokens_accepted=0 if served is None else served.num_accepted_tokens,
            kv_conversion=entry.kv_conversion,
            prompt_tokens_loaded={} if served is None else served.loaded_tokens,
        )

    async def wait_for_end(self, reason: FinishReason | None) -> None:
        """Return at once: a sequence ends with its last token."""
