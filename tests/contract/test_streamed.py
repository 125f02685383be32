"""A streaming call that is cancelled ends at once on the server, wherever it stood."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from baton.v1 import node_pb2, node_pb2_grpc
from serving.channel import open_channel
from serving.server import Service, serving
from serving.status import named_errors
from serving.streamed import streamed

PATIENCE_S = 30
# More than fits into the windows of a stream, so that the server waits inside a write.
TOO_LARGE = "x" * (1 << 20)


class Flood(node_pb2_grpc.PrefillServiceServicer):
    def __init__(self, is_waiting_inside: bool) -> None:
        self._is_waiting_inside = is_waiting_inside
        self.ended = asyncio.Event()

    @streamed
    async def Prefill(  # noqa: N802
        self, request: node_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        async with named_errors(context), aclosing(self._pieces()) as pieces:
            async for piece in pieces:
                yield node_pb2.PrefillResponse(output=node_pb2.TokenOutput(error=piece))

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
) -> AsyncIterator[aio.UnaryStreamCall[node_pb2.PrefillRequest, node_pb2.PrefillResponse]]:
    service = Service(
        "baton.v1.PrefillService",
        lambda server: node_pb2_grpc.add_PrefillServiceServicer_to_server(flood, server),
    )
    async with (
        serving("127.0.0.1", 0, [service]) as server,
        open_channel(server.address) as channel,
    ):
        yield node_pb2_grpc.PrefillServiceStub(channel).Prefill(node_pb2.PrefillRequest())


@pytest.mark.parametrize("is_waiting_inside", [True, False])
def test_cancelling_ends_the_method_without_the_garbage_collector(is_waiting_inside: bool) -> None:
    async def scene() -> None:
        flood = Flood(is_waiting_inside)
        async with a_call(flood) as call:
            await call.read()

            call.cancel()

            await flood.ended.wait()

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
    finally:
        gc.enable()
