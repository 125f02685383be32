"""Has nodes follow the orders of operators that they have missed."""

from __future__ import annotations

import asyncio
import logging

from grpc import StatusCode

from baton.router.adapters.calls import AdapterCalls, Outcome
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.node_info import NameOrder
from baton.rpc.status import RemoteError

log = logging.getLogger(__name__)

NUM_TRIES = 3
PAUSE_S = 2.0  # before another try
# Of an order, for which updates wait. A load that takes longer has been read by the next try.
TIMEOUT_S = 10.0


class AdapterRestores:
    """Repeats orders on nodes that have missed them, with the generation of each order.

    A node that joins gets the names that it lacks, and later what has changed about its own.
    """

    def __init__(self, table: NodeTable, calls: AdapterCalls, turn: asyncio.Lock) -> None:
        """`turn` is that of the updates, which send their orders to all nodes themselves."""
        self._table = table
        self._calls = calls
        self._turn = turn
        self._tried: dict[str, tuple[Node, set[NameOrder]]] = {}  # by address
        self._version: int | None = None  # of the adapters, at the last look
        self._tasks: set[asyncio.Task[None]] = set()

    def handle_reports(self) -> None:
        """Find nodes that have missed orders."""
        nodes = {node.address: node for node in self._table.nodes}
        self._tried = {
            address: tried
            for address, tried in self._tried.items()
            if nodes.get(address) is tried[0]
        }
        if self._version == self._table.adapters.version and nodes.keys() == self._tried.keys():
            return
        self._version = self._table.adapters.version
        for address, node in nodes.items():
            if node.card.max_loras and not self._table.adapters.has_report_of(address):
                continue
            is_joining = address not in self._tried
            _, tried = self._tried.setdefault(address, (node, set()))
            missed = set(self._missed(node, is_joining=is_joining))
            if missed - tried:
                task = asyncio.ensure_future(self._restore(node, is_joining=is_joining))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._tried[address] = node, missed  # what was done in between may be missed again

    def _missed(self, node: Node, *, is_joining: bool) -> list[NameOrder]:
        if not node.card.max_loras or self._table.node_at(node.address) is not node:
            return []
        return self._table.adapters.missed_by(node.address, is_joining=is_joining)

    async def _restore(self, node: Node, *, is_joining: bool) -> None:
        for number in range(NUM_TRIES):
            if number:
                await asyncio.sleep(PAUSE_S)
            if await self._repeat_all(node, is_joining=is_joining):
                return
        for order in self._missed(node, is_joining=is_joining):
            async with self._turn:
                if _is_unanswered(await self._unload_older(node, order)):
                    return

    async def _repeat_all(self, node: Node, *, is_joining: bool) -> bool:
        """Return whether another try is of no use. Updates have their turn between two orders."""
        is_over = True
        for order in self._missed(node, is_joining=is_joining):
            async with self._turn:
                if self._table.adapters.missed_order(node.address, order.name) != order:
                    continue  # an update has overtaken it
                outcome = await self._repeat(node, order)
            if _is_unanswered(outcome):
                return False
            is_over = is_over and not isinstance(outcome, RemoteError)
        return is_over

    async def _repeat(self, node: Node, order: NameOrder) -> Outcome:
        if self._table.node_at(node.address) is not node:
            return None
        outcome = await self._calls.send(node, order, timeout_s=TIMEOUT_S)
        done = "unloaded" if order.adapter is None else "loaded"
        if isinstance(outcome, RemoteError):
            log.warning(
                "%s has missed that adapter %r was %s: %s",
                *(node.card.node_id, order.name, done, outcome),
            )
        else:
            log.info("%s has %s adapter %r, as ordered before", node.card.node_id, done, order.name)
        return outcome

    async def _unload_older(self, node: Node, order: NameOrder) -> Outcome:
        """Unload what a node has under a name if it cannot load what the name means now."""
        has_older = self._table.adapters.at(node.address).adapter(order.name) is not None
        is_missed = self._table.adapters.missed_order(node.address, order.name) == order
        if order.adapter is None or not has_older or not is_missed:
            return None
        # With the same generation: the load of this order outranks it.
        outcome = await self._calls.send(node, NameOrder(order.name, order.generation))
        if not isinstance(outcome, RemoteError):
            log.warning(
                "%s has unloaded its older adapter %r: it cannot load %s",
                *(node.card.node_id, order.name, order.adapter.id),
            )
        return outcome


def _is_unanswered(outcome: Outcome) -> bool:
    return isinstance(outcome, RemoteError) and outcome.code is StatusCode.DEADLINE_EXCEEDED
