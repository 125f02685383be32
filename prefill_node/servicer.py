"""gRPC servicer of the prefill node."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from grpc import aio

from baton.node.call_server import CallServer
from baton.v1 import node_pb2, node_pb2_grpc


class PrefillServicer(node_pb2_grpc.PrefillServiceServicer):
    def __init__(self, calls: CallServer) -> None:
        self._calls = calls

    def Prefill(
        self,
        request_iterator: AsyncIterator[node_pb2.PrefillRequest],
        context: aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        return self._calls.serve(request_iterator, context)
