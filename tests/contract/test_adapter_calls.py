"""Calls of operators that change the adapters of a node, over gRPC."""

from __future__ import annotations

import asyncio

import pytest
from grpc import aio

from baton.rpc.channel import open_channel
from baton.rpc.security.token import NO_OPERATORS, AcceptedTokens, Operators
from baton.rpc.status import remote_error
from baton.v1 import node_pb2, node_pb2_grpc
from tests.support.node_servers import a_node_server

OPERATORS = Operators(AcceptedTokens(("secret",)))


@pytest.mark.parametrize(
    ("operators", "metadata", "reason"),
    [
        (NO_OPERATORS, (), "NOT_AN_OPERATOR"),
        (OPERATORS, (), "NOT_AN_OPERATOR"),
        (OPERATORS, OPERATORS.metadata, "UNSUPPORTED_INPUT"),
    ],
    ids=["no operators", "no token", "no adapters"],
)
def test_calls_of_a_node_without_adapters_are_refused(
    operators: Operators, metadata: tuple[tuple[str, str], ...], reason: str
) -> None:
    async def scenario() -> None:
        async with (
            a_node_server(operators=operators) as node,
            open_channel(node.address) as channel,
        ):
            stub = node_pb2_grpc.NodeServiceStub(channel)
            for call in (
                stub.ReadAdapter(node_pb2.ReadAdapterRequest(path="a"), metadata=metadata),
                stub.SetAdapterNames(node_pb2.SetAdapterNamesRequest(), metadata=metadata),
            ):
                with pytest.raises(aio.AioRpcError) as refused:
                    await call
                assert remote_error(refused.value).reason == reason

    asyncio.run(scenario())
