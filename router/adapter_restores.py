"""Brings the names of adapters back to nodes that join."""

from __future__ import annotations

import asyncio
import logging

from baton.core.ids import AdapterRef
from baton.router.adapter_calls import AdapterCalls
from baton.router.routing.node_table import Node, NodeTable

log = logging.getLogger(__name__)

NUM_TRIES = 3
PAUSE_S = 2.0  # before another try


class AdapterRestores:
    """Loads on a node that joins the adapters that operators have loaded on the others.

    Only nodes that join get names: a node that loses one later has been ordered to.
    """

    def __init__(self, table: NodeTable, calls: AdapterCalls, turn: asyncio.Lock) -> None:
        """`turn` is that of the updates, so that a name is not restored while it is unloaded."""
        self._table = table
        self._calls = calls
        self._turn = turn
        self._seen: dict[str, Node] = {}  # by address
        self._tasks: set[asyncio.Task[None]] = set()

    def handle_reports(self) -> None:
        """Look for nodes that have joined."""
        nodes = {node.address: node for node in self._table.nodes}
        for address, node in nodes.items():
            if self._seen.get(address) is not node and node.card.max_loras:
                task = asyncio.ensure_future(self._restore(node))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._seen = nodes

    async def _restore(self, node: Node) -> None:
        for number in range(NUM_TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            async with self._turn:
                if await self._load_missing(node):
                    return

    async def _load_missing(self, node: Node) -> bool:
        """Return whether another try is of no use."""
        is_complete = True
        for adapter in self._missing(node):
            if self._table.node_at(node.address) is not node:
                return True
            outcome = await self._calls.load(node, adapter, can_replace=True)
            if isinstance(outcome, AdapterRef):
                log.info("%s serves adapter %r again", node.card.node_id, adapter.name)
            else:
                is_complete = False
                log.warning(
                    "%s did not load adapter %r of the other nodes: %s",
                    node.card.node_id,
                    adapter.name,
                    outcome,
                )
        return is_complete

    def _missing(self, node: Node) -> list[AdapterRef]:
        """Return what names mean that the node does not have, or has for another adapter."""
        ids = {ref.name: ref.id for ref in self._table.adapters.at(node.address).refs}
        return [
            variant.adapter
            for name, variant in self._table.adapters.variants.items()
            if variant.base == node.card.model
            and variant.adapter.path
            and ids.get(name) != variant.adapter.id
        ]
