"""Orders of operators to nodes, passed on by the router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.core.legs import MAX_DRAIN_S, LegKind, Legs
from baton.core.pause_mode import PauseMode
from baton.kv_transfer.external_kv import check_tiers
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.errors import DeadlineExceeded, NodeFailed, NotAnOperator
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.security.token import NO_OPERATORS, Operators
from baton.rpc.status import RemoteError, invalid_request_in, remote_error
from baton.v1 import node_pb2, node_pb2_grpc

RESET_TIMEOUT_S = 10.0  # a node answers between two steps of its engine
DRAIN_MARGIN_S = 30.0  # in which a node moves the legs that its drain has left

Response = TypeVar("Response")
# Codes of refusals that another try would get, too.
REFUSED = {
    StatusCode.INVALID_ARGUMENT,
    StatusCode.NOT_FOUND,
    StatusCode.FAILED_PRECONDITION,
    StatusCode.RESOURCE_EXHAUSTED,
}


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


@dataclass(frozen=True, slots=True)
class NodeReset:
    """Blocks that a node has dropped from its prefix cache."""

    address: str
    node_id: str
    num_blocks: int  # of the KV cache
    num_blocks_by_tier: Mapping[str, int] = field(default_factory=dict)


class NodeOrders:
    """Orders to one node, by its name or address, or to all.

    `shown` is the caller's authorization. Each order raises NotAnOperator if the router or a node
    does not take it, InvalidRequest if it cannot be followed, and NodeFailed.
    """

    def __init__(
        self,
        table: NodeTable,
        channel: Callable[[str], aio.Channel],
        operators: Operators = NO_OPERATORS,
    ) -> None:
        self._table = table
        self._stubs = NodeStubs(channel)
        self._operators = operators

    async def set_legs(
        self, name: str, legs: Collection[LegKind], drain_timeout_s: float, shown: str | None
    ) -> Legs:
        """Have a node offer these legs instead of others, and return all that it then offers.

        Raises DeadlineExceeded if the node does not answer after its drain.
        """
        self._operators.check(shown)
        node = self._find(name)
        request = node_pb2.SetLegsRequest(
            legs=map(KIND.to_message, legs), drain_timeout_s=drain_timeout_s
        )
        # The node refuses a drain of more than a day, and one that is not a number.
        limit_s = DRAIN_MARGIN_S + min(max(0.0, drain_timeout_s), MAX_DRAIN_S)
        call = self._stubs.of(node).SetLegs(
            request, timeout=limit_s, metadata=self._operators.metadata
        )
        return tuple(map(KIND.from_message, (await _answer(call, node)).legs))

    async def set_pause(self, name: str, mode: PauseMode | None, shown: str | None) -> None:
        """Pause a node, and return when it computes nothing, or resume it."""
        self._operators.check(shown)
        node = self._find(name)
        request = node_pb2.SetPauseRequest(mode=PAUSE_MODE.to_message(mode))
        # Without a time limit: in mode `wait`, the node waits for the longest of its answers.
        await _answer(
            self._stubs.of(node).SetPause(request, metadata=self._operators.metadata), node
        )

    async def reset_prefix_caches(
        self, tiers: Collection[str] = (), shown: str | None = None, *, reset_running: bool = False
    ) -> list[NodeReset]:
        """Reset these tiers of every node, or all tiers, whether it accepts requests or not.

        Other nodes are reset if one fails.
        """
        self._operators.check(shown)
        check_tiers(tiers)
        request = node_pb2.ResetPrefixCacheRequest(tiers=tiers, reset_running=reset_running)
        outcomes = await self._stubs.call(
            sorted(self._table.nodes, key=lambda node: node.address),
            lambda stub: stub.ResetPrefixCache(
                request, timeout=RESET_TIMEOUT_S, metadata=self._operators.metadata
            ),
        )
        return [
            NodeReset(node.address, node.card.node_id, each.num_blocks, {**each.num_blocks_by_tier})
            for node, each in answers(outcomes, "did not reset their prefix cache").items()
        ]

    def _find(self, name: str) -> Node:
        for node in self._table.nodes:
            if name in (node.card.node_id, node.address):
                return node
        known = ", ".join(sorted(node.card.node_id for node in self._table.nodes))
        raise InvalidRequest(f"no node {name!r} is reachable; there are: {known or 'none'}", "node")


async def _answer(call: Awaitable[Response], node: Node) -> Response:
    """Wait for a node's answer. Raises as the orders do, and DeadlineExceeded."""
    try:
        return await call
    except RpcError as error:
        remote = remote_error(error)
        message = f"{node.card.node_id}: {remote.message}"
        if remote.code is StatusCode.PERMISSION_DENIED:
            raise NotAnOperator(message) from error
        if remote.code is StatusCode.DEADLINE_EXCEEDED:
            raise DeadlineExceeded(
                f"{node.card.node_id} has not answered in time, and may follow the order later: "
                "look at `baton nodes`, and restart the node if it hangs"
            ) from error
        if remote.code in (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED):
            raise invalid_request_in(remote) from error
        raise NodeFailed(message) from error
