"""Calls of nodes that follow an operator's order, and their outcomes on several nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.router.routing.nodes import Node
from baton.rpc.errors import NodeFailed, NotAnOperator
from baton.rpc.status import RemoteError, remote_error
from baton.v1 import node_pb2_grpc

# Codes of refusals that another try would get, too.
REFUSED = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}

Response = TypeVar("Response")
Stub: TypeAlias = "node_pb2_grpc.NodeServiceAsyncStub"
Outcomes = Mapping[Node, Response | RemoteError]


class NodeStubs:
    """Stubs of nodes, by the channels of this router."""

    def __init__(self, channel: Callable[[str], aio.Channel]) -> None:
        self._channel = channel

    def of(self, node: Node) -> Stub:
        stub: Stub = node_pb2_grpc.NodeServiceStub(self._channel(node.address))
        return stub

    async def call(
        self, nodes: Sequence[Node], call: Callable[[Stub], Awaitable[Response]]
    ) -> Outcomes[Response]:
        """Call all nodes at once."""

        async def call_one(node: Node) -> Response | RemoteError:
            try:
                return await call(self.of(node))
            except RpcError as error:
                return remote_error(error)

        outcomes = await asyncio.gather(*map(call_one, nodes))
        return dict(zip(nodes, outcomes, strict=True))


def answers(outcomes: Outcomes[Response], failed: str) -> Mapping[Node, Response]:
    """Return what all nodes have answered. Raises the failures of those that have not, as one."""
    failures = {node: each for node, each in outcomes.items() if isinstance(each, RemoteError)}
    if not failures:
        return {node: each for node, each in outcomes.items() if not isinstance(each, RemoteError)}
    causes = "; ".join(f"{node.card.node_id}: {each.message}" for node, each in failures.items())
    message = f"{len(failures)} of {len(outcomes)} nodes {failed} ({causes})"
    codes = {each.code for each in failures.values()}
    if StatusCode.PERMISSION_DENIED in codes:
        raise NotAnOperator(message)
    if codes <= REFUSED:
        raise InvalidRequest(message)
    raise NodeFailed(f"{message}; try again")
