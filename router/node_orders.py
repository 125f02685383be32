"""Orders of operators to single nodes, passed on by the router."""

from __future__ import annotations

from collections.abc import Callable, Collection

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.core.legs import LegKind, Legs
from baton.core.pause_mode import PauseMode
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.errors import NodeFailed, NotAnOperator
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.security.operators import NO_OPERATORS, Operators
from baton.rpc.status import invalid_request_in, remote_error
from baton.v1 import node_pb2, node_pb2_grpc


class NodeOrders:
    def __init__(
        self,
        table: NodeTable,
        channel: Callable[[str], aio.Channel],
        operators: Operators = NO_OPERATORS,
    ) -> None:
        self._table = table
        self._channel = channel
        self._operators = operators

    async def set_legs(
        self, name: str, legs: Collection[LegKind], drain_timeout_s: float, shown: str | None
    ) -> Legs:
        """Have a node offer these legs instead of others, and return all that it then offers.

        `name` is the node's name or address, `shown` the caller's authorization. Raises
        NotAnOperator, InvalidRequest and NodeFailed.
        """
        self._operators.check(shown)
        node = self._find(name)
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node.address))
        request = node_pb2.SetLegsRequest(
            legs=map(KIND.to_message, legs), drain_timeout_s=drain_timeout_s
        )
        try:  # without a time limit: the node has one
            response = await stub.SetLegs(request, metadata=self._operators.metadata)
        except RpcError as error:
            raise _named_error(error, node) from error
        return tuple(map(KIND.from_message, response.legs))

    async def set_pause(self, name: str, mode: PauseMode | None, shown: str | None) -> None:
        """Pause a node, and return when it computes nothing, or resume it.

        `name` is the node's name or address, `shown` the caller's authorization. Raises
        NotAnOperator, InvalidRequest and NodeFailed.
        """
        self._operators.check(shown)
        node = self._find(name)
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node.address))
        # Without a time limit: in mode `wait`, the node waits for the longest of its answers.
        request = node_pb2.SetPauseRequest(mode=PAUSE_MODE.to_message(mode))
        try:
            await stub.SetPause(request, metadata=self._operators.metadata)
        except RpcError as error:
            raise _named_error(error, node) from error

    def _find(self, name: str) -> Node:
        for node in self._table.nodes:
            if name in (node.card.node_id, node.address):
                return node
        known = ", ".join(sorted(node.card.node_id for node in self._table.nodes))
        raise InvalidRequest(f"no node {name!r} is reachable; there are: {known or 'none'}", "node")


def _named_error(error: RpcError, node: Node) -> NotAnOperator | InvalidRequest | NodeFailed:
    remote = remote_error(error)
    message = f"{node.card.node_id}: {remote.message}"
    if remote.code is StatusCode.PERMISSION_DENIED:
        return NotAnOperator(message)
    if remote.code in (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED):
        return invalid_request_in(remote)
    return NodeFailed(message)
