"""Loads and unloads adapters on all nodes of a model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from grpc import aio

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef, ModelVariant
from baton.router.adapters.calls import AdapterCalls, Outcome, only_adapter, raise_failures
from baton.router.adapters.restores import AdapterRestores
from baton.router.input_processing.limits import check_name, is_valid_name
from baton.router.routing.node_table import NodeTable
from baton.router.routing.nodes import Node
from baton.rpc.errors import NodeFailed, NoNodes, NotAnOperator, TooManyUpdates, UnknownModel
from baton.rpc.node_info import NameOrder
from baton.rpc.security.operators import NO_OPERATORS, Operators

MAX_UPDATES = 32  # that run or wait for their turn
REFUSAL_PAUSE_S = 0.5
REPORT_TIMEOUT_S = 10.0  # in which nodes report what they have done
log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Adapter to load."""

    name: str
    path: str  # relative to the nodes' --lora-root
    model: str = ""  # base; empty: the only one whose nodes serve adapters
    can_replace: bool = False


class AdapterUpdates:
    """Loads an adapter on every open node of its model, or on none; one update at a time."""

    def __init__(
        self,
        table: NodeTable,
        channel: Callable[[str], aio.Channel],
        operators: Operators = NO_OPERATORS,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._table = table
        self._clock_ns = clock_ns
        self._operators = replace(operators, is_open=False)  # they change answers of all clients
        self._calls = AdapterCalls(channel, self._operators)
        self._turn = asyncio.Lock()
        # Without operators of its own, the router cannot load anything.
        self._restores = AdapterRestores(table, self._calls, self._turn)
        self._can_restore = operators.tokens is not None
        self._num_updates = 0
        self._running: set[asyncio.Future[Any]] = set()  # at most one, so that it is not collected
        self._reported = asyncio.Event()

    def handle_reports(self) -> None:
        """Look again for what nodes have reported: the table has changed."""
        if self._can_restore:
            self._restores.handle_reports()
        self._reported.set()
        self._reported = asyncio.Event()

    async def load(self, order: AdapterOrder, shown: str | None = None) -> tuple[ModelVariant, int]:
        """Return the adapter and the number of its nodes. `shown` is the caller's authorization.

        When it returns, requests of this router can use the adapter. Raises NotAnOperator,
        TooManyUpdates, and InvalidRequest and NodeFailed if a node has not loaded it; then no node
        has.
        """
        await self._check_right(shown)
        _check_order(order)
        return await self._complete(partial(self._load_on_all, order))

    async def unload(self, name: str, shown: str | None = None) -> int:
        """Return the number of nodes that had the adapter. Requests in progress keep it.

        Raises NotAnOperator, TooManyUpdates, UnknownModel, and NodeFailed if a node has not
        unloaded it.
        """
        await self._check_right(shown)
        return await self._complete(partial(self._unload_from_all, name))

    async def _check_right(self, shown: str | None) -> None:
        """Raises NotAnOperator, and TooManyUpdates after a pause."""
        self._operators.check(shown)
        if self._num_updates >= MAX_UPDATES:
            await asyncio.sleep(REFUSAL_PAUSE_S)  # a client that repeats it at once is slowed down
            raise TooManyUpdates(
                f"{MAX_UPDATES} loads and unloads of adapters wait for their turn; send this one "
                "again later"
            )

    async def _complete(self, update: Callable[[], Coroutine[None, None, Result]]) -> Result:
        """Wait for this update's turn, and run it.

        If its caller disconnects before that, it is forgotten. An update that has begun runs to its
        end: nodes must not differ.
        """
        self._num_updates += 1
        try:
            await self._turn.acquire()
        except BaseException:
            self._num_updates -= 1
            raise
        task = asyncio.ensure_future(update())
        self._running.add(task)
        task.add_done_callback(self._note_end)
        return await asyncio.shield(task)

    def _note_end(self, task: asyncio.Future[Any]) -> None:
        self._num_updates -= 1
        self._running.discard(task)
        self._turn.release()
        if not task.cancelled():
            task.exception()  # its caller may have disconnected

    async def _load_on_all(self, order: AdapterOrder) -> tuple[ModelVariant, int]:
        self._check_has_nodes()
        self._check_name_is_free(order)
        nodes = self._nodes_for(order)
        previous = {node: self._named_on(node, order.name) for node in nodes}
        generation = self._next_generation(order.name)
        sent = NameOrder(order.name, generation, AdapterRef(order.name, path=order.path))
        outcomes = await _each(
            nodes,
            # The name is free, so a node that has it nevertheless has missed an unload.
            lambda node: self._calls.send(
                node, sent, can_replace=order.can_replace or previous[node] is not None
            ),
        )
        try:
            adapter = only_adapter(order.name, order.path, nodes, outcomes)
        except (InvalidRequest, NodeFailed, NotAnOperator):
            loaded = [
                node
                for node, outcome in zip(nodes, outcomes, strict=True)
                if isinstance(outcome, AdapterRef)
            ]
            await _each(
                loaded,
                lambda node: self._undo(
                    node, NameOrder(order.name, generation + 1, previous[node])
                ),
            )
            raise
        done = f"adapter {order.name!r} is loaded"
        await self._until_reported(nodes, NameOrder(order.name, generation, adapter), done)
        return ModelVariant(nodes[0].card.model, adapter), len(nodes)

    async def _unload_from_all(self, name: str) -> int:
        self._check_has_nodes()
        variant = self._table.served.variants.get(name)
        unknown = f"there is no adapter {_quoted(name)}; {self._known()}"
        if not is_valid_name(name) or (variant is not None and not variant.adapter.name):
            raise UnknownModel(unknown)
        # Nodes remember names that they do not have, for those that join later with them.
        nodes = [node for node in self._table.nodes if node.card.max_loras]
        if variant is not None:
            nodes = [node for node in nodes if node.card.model == variant.base]
        generation = self._next_generation(name)
        for model in {node.card.model for node in nodes}:
            self._table.note_unload(model, name, generation)
        order = NameOrder(name, generation)
        outcomes = await _each(nodes, lambda node: self._calls.send(node, order))
        raise_failures(nodes, outcomes, f"did not unload adapter {name!r}")
        if variant is None and not any(isinstance(each, AdapterRef) for each in outcomes):
            raise UnknownModel(unknown)
        await self._until_reported(nodes, order, f"adapter {name!r} is unloaded")
        return sum(isinstance(outcome, AdapterRef) for outcome in outcomes)

    def _check_has_nodes(self) -> None:
        """Raise NoNodes while no node is known, as after a restart: any may have the name."""
        if not self._table.nodes:
            raise NoNodes("no node has joined this router yet; send this again")

    def _next_generation(self, name: str) -> int:
        return self._table.adapters.next_generation(name, self._clock_ns())

    def _check_name_is_free(self, order: AdapterOrder) -> None:
        """Raises InvalidRequest if the name is taken."""
        taken = self._table.served.variants.get(order.name)
        if taken is None:
            return
        if not taken.adapter.name:
            raise InvalidRequest(f"{order.name!r} is the name of a served model; choose another")
        if order.model not in ("", taken.base):
            raise InvalidRequest(
                f"{order.name!r} is the name of an adapter of {taken.base!r}; choose another"
            )
        if not order.can_replace:
            raise InvalidRequest(
                f"the adapter {order.name!r} has already been loaded; unload it first, or replace "
                "it: --replace, load_inplace over HTTP"
            )

    def _named_on(self, node: Node, name: str) -> AdapterRef | None:
        return self._table.adapters.at(node.address).adapter(name)

    def _nodes_for(self, order: AdapterOrder) -> list[Node]:
        """Return the nodes that serve adapters of the model. Raises what names the remedy."""
        by_model: defaultdict[str, list[Node]] = defaultdict(list)
        for node in sorted(self._table.nodes, key=lambda node: node.card.node_id):
            if node.card.max_loras and self._table.is_open(node):
                by_model[node.card.model].append(node)
        served = self._table.served
        taken = served.variants.get(order.name)
        model = order.model or ("" if taken is None else taken.base)
        if model and model not in served.bases:
            raise UnknownModel(f"model {_quoted(model)} is not served here: {served.listed()}")
        able = [model] if model else sorted(by_model)
        if len(able) > 1:
            raise InvalidRequest(f"set model to that of the adapter: {', '.join(able)}", "model")
        if not able or not by_model[able[0]]:
            raise InvalidRequest(
                "no open node takes adapters of this model: start the nodes with --lora-root"
            )
        return by_model[able[0]]

    def _has_reported(self, node: Node, order: NameOrder) -> bool:
        """Return whether a node reports this order or a later one, or is not there any more."""
        own = self._table.adapters.at(node.address).orders.get(order.name)
        is_later = own is not None and own.generation > order.generation
        is_done = (None if own is None else own.adapter) == order.adapter
        return is_later or is_done or self._table.node_at(node.address) != node

    async def _until_reported(self, nodes: Sequence[Node], order: NameOrder, done: str) -> None:
        """Wait for the nodes' own reports: until then, the table has what they had before."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                while not all(self._has_reported(node, order) for node in nodes):
                    await self._reported.wait()
        except TimeoutError:
            raise NodeFailed(
                f"{done}, but not all nodes have reported it within {REPORT_TIMEOUT_S:.0f} s; see "
                "`baton nodes`"
            ) from None

    async def _undo(self, node: Node, order: NameOrder) -> Outcome:
        """Give the name back to what the node had, or unload it if that is not there any more."""
        outcome = await self._calls.send(node, order)
        if order.adapter is None or isinstance(outcome, AdapterRef):
            return outcome
        log.warning("%s could not take adapter %r back: %s", node.address, order.name, outcome)
        return await self._calls.send(node, NameOrder(order.name, order.generation))

    def _known(self) -> str:
        served = self._table.served
        names = [name for name in served.names if name not in served.bases]
        return f"loaded: {', '.join(names)}" if names else "none is loaded"


async def _each(nodes: Sequence[Node], do: Callable[[Node], Awaitable[Outcome]]) -> list[Outcome]:
    return list(await asyncio.gather(*map(do, nodes)))


def _check_order(order: AdapterOrder) -> None:
    if not order.name or not order.path:
        raise InvalidRequest("both the name and the path of an adapter must be given")
    check_name("name", order.name)
    check_name("path", order.path)


def _quoted(name: str) -> str:
    """Return a name that a client has sent, as part of an error."""
    return repr(name) if is_valid_name(name) else "of this name"
