"""Calls to nodes over real gRPC: what becomes of them when the client's time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import aio

from baton.v1 import node_pb2, node_pb2_grpc
from engine.sampling import SamplingParams
from kv_transfer.types import HandoffId
from router.node_calls import GrpcNodeCalls
from router.nodes import Node
from serving.errors import DeadlineExceeded, MessageTooLarge
from serving.node import NodeRole
from serving.server import Service, serving
from serving.sizes import MAX_MESSAGE_BYTES
from serving.streamed import streamed
from serving.translate_sequence import Sequence
from tests.support.node_calls import a_card

PATIENCE_S = 30
HANDOFF = HandoffId("r", 1)
SEQUENCE = Sequence((1, 2, 3), SamplingParams(), seed=1)


class SlowNode(node_pb2_grpc.PrefillServiceServicer, node_pb2_grpc.DecodeServiceServicer):
    """Hears of each request, and answers none before it is told to give up."""

    def __init__(self, first_answer: node_pb2.DecodeResponse | None = None) -> None:
        self._first_answer = first_answer
        self.remaining_s: asyncio.Queue[float | None] = asyncio.Queue()
        self.gave_up = asyncio.Event()

    @streamed
    async def Prefill(  # noqa: N802
        self, request: node_pb2.PrefillRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.PrefillResponse, None]:
        await self._work(context)
        yield node_pb2.PrefillResponse()

    @streamed
    async def Decode(  # noqa: N802
        self, request: node_pb2.DecodeRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncGenerator[node_pb2.DecodeResponse, None]:
        if self._first_answer is not None:
            yield self._first_answer
        await self._work(context)

    async def Connect(  # noqa: N802
        self, request: node_pb2.ConnectRequest, context: aio.ServicerContext[Any, Any]
    ) -> node_pb2.ConnectResponse:
        return node_pb2.ConnectResponse()

    async def _work(self, context: aio.ServicerContext[Any, Any]) -> None:
        self.remaining_s.put_nowait(context.time_remaining())
        try:
            await asyncio.Event().wait()
        finally:
            self.gave_up.set()


@asynccontextmanager
async def calls_to(slow: SlowNode) -> AsyncIterator[tuple[GrpcNodeCalls, Node]]:
    services = (
        Service(
            "baton.v1.PrefillService",
            lambda server: node_pb2_grpc.add_PrefillServiceServicer_to_server(slow, server),
        ),
        Service(
            "baton.v1.DecodeService",
            lambda server: node_pb2_grpc.add_DecodeServiceServicer_to_server(slow, server),
        ),
    )
    async with serving("127.0.0.1", 0, services) as server, GrpcNodeCalls() as calls:
        yield calls, Node(server.address, a_card(NodeRole.DECODE))


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_node_knows_the_time_that_remains_and_gives_up_by_itself(leg: str) -> None:
    async def scene() -> None:
        slow = SlowNode()
        async with calls_to(slow) as (calls, node):
            if leg == "prefill":
                stream = calls.prefill(node, HANDOFF, SEQUENCE, timeout_s=0.3)
            else:
                stream = calls.decode(node, HANDOFF, SEQUENCE, None, timeout_s=0.3)

            with pytest.raises(DeadlineExceeded, match="decode node decode"):
                await anext(stream)

            await slow.gave_up.wait()
            told_s = await slow.remaining_s.get()
        assert told_s is not None
        assert 0 <= told_s < 0.6  # gRPC rounds what it sends

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_without_a_deadline_a_node_is_told_of_none() -> None:
    async def scene() -> None:
        slow = SlowNode()
        async with calls_to(slow) as (calls, node):
            stream = calls.decode(node, HANDOFF, SEQUENCE, None)
            asked = asyncio.ensure_future(anext(stream))

            assert await slow.remaining_s.get() is None

            asked.cancel()
            await slow.gave_up.wait()

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))


def test_an_answer_that_is_too_large_to_send_is_not_taken_for_a_broken_node() -> None:
    too_large = node_pb2.DecodeResponse(
        output=node_pb2.TokenOutput(error="x" * (MAX_MESSAGE_BYTES + 1))
    )

    async def scene() -> None:
        async with calls_to(SlowNode(too_large)) as (calls, node):
            with pytest.raises(MessageTooLarge, match="larger than max"):
                await anext(calls.decode(node, HANDOFF, SEQUENCE, None))

    asyncio.run(asyncio.wait_for(scene(), PATIENCE_S))
