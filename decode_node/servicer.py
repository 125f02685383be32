"""gRPC servicer of the decode node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from grpc import aio

from baton.node.call_server import CallServer
from baton.node.state import NodeState
from baton.rpc.status import named_errors
from baton.v1 import node_pb2, node_pb2_grpc


class DecodeServicer(node_pb2_grpc.DecodeServiceServicer):
    def __init__(
        self, calls: CallServer, state: NodeState, connect: Callable[[str], Awaitable[None]]
    ) -> None:
        self._calls = calls
        self._state = state
        self._connect = connect

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
