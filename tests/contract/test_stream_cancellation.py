"""Cancellation of a streaming call: it ends at once on the server, at any point."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from baton.rpc.channel import open_channel
from baton.rpc.server import Service, serving
from baton.rpc.status import named_errors
from baton.v1 import cluster_pb2, cluster_pb2_grpc

PATIENCE_S = 30
# More than fits into the windows of a stream, so that the server waits inside a write.
TOO_LARGE = "x" * (1 << 20)


class Flood(cluster_pb2_grpc.ClusterServiceServicer):
    def __init__(self, is_waiting_inside: bool) -> None:
        self._is_waiting_inside = is_waiting_inside
        self.ended = asyncio.Event()

    async def WatchNodes(  # noqa: N802
        self, request: cluster_pb2.WatchNodesRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[cluster_pb2.WatchNodesResponse, None]:
        async with named_errors(context), aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                report = cluster_pb2.NodeReport(address=piece)
                yield cluster_pb2.WatchNodesResponse(nodes=[report])

    async def ResetPrefixCaches(  # noqa: N802
        self,
        request: cluster_pb2.ResetPrefixCachesRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ResetPrefixCachesResponse:
        return cluster_pb2.ResetPrefixCachesResponse()

    async def AddAdapter(  # noqa: N802
        self, request: cluster_pb2.AddAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.AddAdapterResponse:
        return cluster_pb2.AddAdapterResponse()

    async def SetPause(  # noqa: N802
        self,
        request: cluster_pb2.ClusterServiceSetPauseRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ClusterServiceSetPauseResponse:
        return cluster_pb2.ClusterServiceSetPauseResponse()

    async def SetLegs(  # noqa: N802
        self,
        request: cluster_pb2.ClusterServiceSetLegsRequest,
        context: aio.ServicerContext[Any, Any],
    ) -> cluster_pb2.ClusterServiceSetLegsResponse:
        return cluster_pb2.ClusterServiceSetLegsResponse()

    async def RemoveAdapter(  # noqa: N802
        self, request: cluster_pb2.RemoveAdapterRequest, context: aio.ServicerContext[Any, Any]
    ) -> cluster_pb2.RemoveAdapterResponse:
        return cluster_pb2.RemoveAdapterResponse()

    async def _pieces(self) -> AsyncGenerator[str, None]:
        try:
            while True:
                yield TOO_LARGE
                if self._is_waiting_inside:
                    await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def a_call(
    flood: Flood,
) -> AsyncIterator[
    aio.UnaryStreamCall[cluster_pb2.WatchNodesRequest, cluster_pb2.WatchNodesResponse]
]:
    service = Service(
        "baton.v1.ClusterService",
        lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(flood, server),
    )
    async with (
        serving("127.0.0.1", 0, [service]) as server,
        open_channel(server.address) as channel,
    ):
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        yield stub.WatchNodes(cluster_pb2.WatchNodesRequest())


@pytest.mark.parametrize("is_waiting_inside", [True, False])
def test_cancelling_ends_the_method_without_the_garbage_collector(is_waiting_inside: bool) -> None:
    async def scenario() -> None:
        flood = Flood(is_waiting_inside)
        async with a_call(flood) as call:
            await call.read()

            call.cancel()

            await flood.ended.wait()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    finally:
        gc.enable()
