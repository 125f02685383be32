"""Resets the prefix caches of all nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

from grpc import RpcError, StatusCode, aio

from baton.kv_transfer.external_kv import check_tiers
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.errors import NodeFailed, NotAnOperator
from baton.rpc.security.operators import NO_OPERATORS, Operators
from baton.rpc.status import remote_error
from baton.v1 import node_pb2, node_pb2_grpc

TIMEOUT_S = 10.0  # a node answers between two steps of its engine


@dataclass(frozen=True, slots=True)
class NodeReset:
    address: str
    node_id: str
    num_blocks: int  # dropped from the cache
    num_blocks_by_tier: Mapping[str, int] = field(default_factory=dict)


class PrefixResets:
    """Resets every known node, whether or not it accepts new requests."""

    def __init__(
        self,
        table: NodeTable,
        channel: Callable[[str], aio.Channel],
        operators: Operators = NO_OPERATORS,
    ) -> None:
        self._table = table
        self._channel = channel
        self._operators = operators

    async def reset_all(
        self,
        tiers: Collection[str] = (),
        shown: str | None = None,
        *,
        reset_running: bool = False,
    ) -> list[NodeReset]:
        """Reset these tiers of all nodes, or all tiers. `shown` is the caller's authorization.

        Raises NotAnOperator if the router or a node does not take it, and InvalidRequest for an
        unknown tier. Raises NodeFailed if a node fails, after resetting the others.
        """
        self._operators.check(shown)
        check_tiers(tiers)
        request = node_pb2.ResetPrefixCacheRequest(tiers=tiers, reset_running=reset_running)
        nodes = sorted(self._table.nodes, key=lambda node: node.address)
        outcomes = await asyncio.gather(*map(partial(self._reset, request), nodes))
        for outcome in outcomes:
            if isinstance(outcome, NotAnOperator):
                raise outcome
        failures = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if failures:
            raise NodeFailed(
                f"{len(failures)} of {len(nodes)} nodes did not reset their prefix cache "
                f"({'; '.join(failures)}); try again"
            )
        return [outcome for outcome in outcomes if isinstance(outcome, NodeReset)]

    async def _reset(
        self, request: node_pb2.ResetPrefixCacheRequest, node: Node
    ) -> NodeReset | NotAnOperator | str:
        """Reset one node. Return the reason if it fails."""
        stub = node_pb2_grpc.NodeServiceStub(self._channel(node.address))
        try:
            response = await stub.ResetPrefixCache(
                request, timeout=TIMEOUT_S, metadata=self._operators.metadata
            )
        except RpcError as error:
            remote = remote_error(error)
            if remote.code is StatusCode.PERMISSION_DENIED:
                return NotAnOperator(f"{node.card.node_id}: {remote.message}")
            return f"{node.card.node_id}: {remote.code.name}: {remote.message}"
        return NodeReset(
            node.address,
            node.card.node_id,
            response.num_blocks,
            dict(response.num_blocks_by_tier),
        )
