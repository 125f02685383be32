"""Gives nodes that join the names of adapters that the others have, and no unloaded ones."""

from __future__ import annotations

import asyncio
import logging

from baton.core.ids import AdapterRef
from baton.router.adapters.calls import AdapterCalls
from baton.router.adapters.missed_unloads import MissedUnloads
from baton.router.routing.node_table import Node, NodeTable
from baton.rpc.status import RemoteError

log = logging.getLogger(__name__)

NUM_TRIES = 3
PAUSE_S = 2.0  # before another try


class AdapterRestores:
    """Loads on a node that joins the adapters that operators have loaded on the others.

    It unloads from it what operators have unloaded while it was away. Only nodes that join are
    changed: a node that loses a name later has been ordered to.
    """

    def __init__(self, table: NodeTable, calls: AdapterCalls, turn: asyncio.Lock) -> None:
        """`turn` is that of the updates, so that a name is not restored while it is unloaded."""
        self._table = table
        self._calls = calls
        self._turn = turn
        self.missed = MissedUnloads()
        self._seen: dict[str, tuple[Node, frozenset[AdapterRef]]] = {}  # by address
        self._tasks: set[asyncio.Task[None]] = set()

    def handle_reports(self) -> None:
        """Look for nodes that have joined, and for those that are gone."""
        nodes = {node.address: node for node in self._table.nodes}
        for node, refs in self._seen.values():
            if nodes.get(node.address) is not node:
                self.missed.note_gone(node, {ref.name for ref in refs})
        for address, node in nodes.items():
            is_new = address not in self._seen or self._seen[address][0] is not node
            if is_new and node.card.max_loras:
                task = asyncio.ensure_future(self._restore(node))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._seen = {
            address: (node, self._table.adapters.at(address).refs)
            for address, node in nodes.items()
        }

    async def _restore(self, node: Node) -> None:
        for number in range(NUM_TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            async with self._turn:
                if await self._unload_missed(node) and await self._load_missing(node):
                    return

    async def _unload_missed(self, node: Node) -> bool:
        """Return whether another try is of no use."""
        is_complete = True
        for name in sorted(self.missed.of(node)):
            if self._table.node_at(node.address) is not node:
                return True
            outcome = await self._calls.unload(node, name)
            if isinstance(outcome, RemoteError):
                is_complete = False
                log.warning(
                    "%s did not unload adapter %r, which was unloaded while it was away: %s",
                    *(node.card.node_id, name, outcome),
                )
            else:
                log.info("%s has unloaded adapter %r, as the others", node.card.node_id, name)
        if is_complete:
            self.missed.note_return(node)
        return is_complete

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
