"""Node with a real gRPC server whose calls are scripted by a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from baton.core.legs import LegKind
from baton.node.call_streams import CallContext, serve_calls
from baton.rpc.errors import Draining
from baton.rpc.server import Service, serving
from baton.rpc.status import named_errors
from baton.v1 import node_pb2, node_pb2_grpc


@dataclass(slots=True)
class ScriptedCall:
    """One call of the node. Events put into `script` are sent in order."""

    order: node_pb2.LegOrder
    context: CallContext
    script: asyncio.Queue[node_pb2.CallEvent | Exception | None] = field(
        default_factory=asyncio.Queue
    )
    left: asyncio.Event = field(default_factory=asyncio.Event)

    def send_tokens(self, *indices: int) -> None:
        """Send one token at each of these indices."""
        for index in indices:
            self.script.put_nowait(a_token(index))

    def end(self, failure: Exception | None = None) -> None:
        self.script.put_nowait(failure)


class ScriptedNode(node_pb2_grpc.LegServiceServicer):
    def __init__(self) -> None:
        self.calls: asyncio.Queue[ScriptedCall] = asyncio.Queue()
        self.num_under_way = 0
        self.num_streams = 0  # opened so far
        self.messages: list[int] = []  # how many events each held
        self.is_draining = False
        self.has_drained = asyncio.Event()
        self.stream_ended = asyncio.Event()

    async def Serve(  # noqa: N802
        self,
        request_iterator: AsyncIterator[node_pb2.ServeRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.ServeResponse, None]:
        self.num_streams += 1
        try:
            calls = serve_calls(
                request_iterator, self._send_tokens, self._count, self.has_drained.wait, node_id="d"
            )
            async with named_errors(context), aclosing(calls):
                async for events in calls:
                    self.messages.append(len(events))
                    yield node_pb2.ServeResponse(events=events)
        finally:
            self.stream_ended.set()

    async def Connect(  # noqa: N802
        self, request: node_pb2.ConnectRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ConnectResponse:
        return node_pb2.ConnectResponse()

    async def _send_tokens(
        self, kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        reported = ScriptedCall(order, context)
        self.calls.put_nowait(reported)
        try:
            while (item := await reported.script.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            reported.left.set()

    @contextmanager
    def _count(self, kind: LegKind) -> Iterator[None]:
        if self.is_draining:
            raise Draining("on its way out")
        self.num_under_way += 1
        try:
            yield
        finally:
            self.num_under_way -= 1


def a_token(index: int) -> node_pb2.CallEvent:
    output = node_pb2.TokenOutput(first_index=index, token_ids=[100 + index])
    return node_pb2.CallEvent(output=output)


@asynccontextmanager
async def serve_scripted_node(node: ScriptedNode, port: int = 0) -> AsyncIterator[str]:
    """Serve the node and yield its address."""
    services = (
        Service(
            "baton.v1.LegService",
            lambda server: node_pb2_grpc.add_LegServiceServicer_to_server(node, server),
        ),
    )
    async with serving("127.0.0.1", port, services) as server:
        yield server.address
