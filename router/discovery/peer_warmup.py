"""Connects pairs of nodes when they join, so that their first hand-off does not wait for it."""

from __future__ import annotations

import asyncio
import logging
import random

from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.routing.node_table import Node, NodeTable
from baton.rpc.errors import ServiceError
from baton.rpc.node_info import NodeRole

# A connection takes memory at both ends, so large clusters are not connected completely.
MAX_PARTNERS = 16

log = logging.getLogger(__name__)


class PeerWarmups:
    def __init__(self, table: NodeTable, node_calls: GrpcNodeCalls) -> None:
        self._table = table
        self._node_calls = node_calls
        self._tasks: set[asyncio.Task[None]] = set()

    def warm_up(self, node: Node) -> None:
        """Connect a new node with nodes of the other role that have compatible KV."""
        partners = self._table.partners(node)
        for partner in random.sample(partners, min(len(partners), MAX_PARTNERS)):
            decode, prefill = node, partner
            if node.card.role is NodeRole.PREFILL:
                decode, prefill = partner, node
            task = asyncio.ensure_future(self._connect(decode, prefill))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, decode: Node, prefill: Node) -> None:
        try:
            await self._node_calls.connect(decode, prefill)
        except ServiceError as failure:
            log.info("not connected with %s yet: %s", prefill.address, failure)
