"""Pauses of a node by gRPC: rights, reports, and requests that come meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from grpc import StatusCode, aio

from baton.core.legs import LegKind
from baton.core.pause_mode import PauseMode
from baton.rpc.channel import open_channel
from baton.rpc.errors import Draining
from baton.rpc.messages.calls import PAUSE_MODE
from baton.rpc.security.token import AcceptedTokens, Operators, authorization
from baton.v1 import node_pb2, node_pb2_grpc
from tests.support.engines import an_engine
from tests.support.node_servers import NodeServer, a_node_server

OPERATORS = Operators(AcceptedTokens(("secret",)))
PATIENCE_S = 30


@asynccontextmanager
async def a_node() -> AsyncIterator[tuple[NodeServer, node_pb2_grpc.NodeServiceAsyncStub]]:
    async with (
        asyncio.timeout(PATIENCE_S),
        a_node_server(operators=OPERATORS, core=an_engine()) as node,
        open_channel(node.address) as channel,
    ):
        yield node, node_pb2_grpc.NodeServiceStub(channel)


def test_only_an_operator_pauses_a_node() -> None:
    async def scenario() -> None:
        async with a_node() as (node, stub):
            with pytest.raises(aio.AioRpcError) as refusal:
                await stub.SetPause(
                    node_pb2.SetPauseRequest(mode=node_pb2.PAUSE_MODE_KEEP),
                    metadata=(authorization("client"),),
                )
            assert refusal.value.code() is StatusCode.PERMISSION_DENIED
            assert not node.state.is_paused

    asyncio.run(scenario())


def test_a_pause_mode_of_a_later_version_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with a_node() as (node, stub):
            with pytest.raises(aio.AioRpcError, match="PauseMode 99 is unknown"):
                await stub.SetPause(
                    node_pb2.SetPauseRequest(mode=99),  # type: ignore[arg-type]
                    metadata=OPERATORS.metadata,
                )
            assert not node.state.is_paused

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", PauseMode)
def test_a_paused_node_reports_it_and_refuses_legs_until_it_is_resumed(mode: PauseMode) -> None:
    async def scenario() -> None:
        async with a_node() as (node, stub):
            await stub.SetPause(
                node_pb2.SetPauseRequest(mode=PAUSE_MODE.to_message(mode)),
                metadata=OPERATORS.metadata,
            )
            watch = stub.Watch(node_pb2.WatchRequest())
            while not (await anext(aiter(watch))).is_paused:
                pass
            with pytest.raises(Draining, match="paused"), node.state.serving_leg(LegKind.DECODE):
                pass

            await stub.SetPause(node_pb2.SetPauseRequest(), metadata=OPERATORS.metadata)

            while (await anext(aiter(watch))).is_paused:
                pass
            watch.cancel()
            with node.state.serving_leg(LegKind.DECODE):
                assert node.state.num_calls == 1

    asyncio.run(scenario())
