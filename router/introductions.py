"""Has nodes link up when they join: the first hand-off of a pair would else wait for that."""

from __future__ import annotations

import asyncio
import logging
import random

from router.node_calls import GrpcNodeCalls
from router.nodes import Node, NodeTable
from serving.errors import ServiceError
from serving.node import NodeRole

# A link takes memory at both ends, so that in a large cluster not everybody gets to know everybody.
MOST_PARTNERS = 16

log = logging.getLogger(__name__)


class Introductions:
    def __init__(self, table: NodeTable, node_calls: GrpcNodeCalls) -> None:
        self._table = table
        self._node_calls = node_calls
        self._tasks: set[asyncio.Task[None]] = set()

    def introduce(self, node: Node) -> None:
        """To those it could share KV with."""
        partners = self._table.partners(node)
        for partner in random.sample(partners, min(len(partners), MOST_PARTNERS)):
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
            log.info("not linked up with %s yet: %s", prefill.address, failure)
