"""Loads and unloads adapters on all nodes of a model."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from grpc import RpcError, StatusCode, aio

from baton.core.errors import InvalidRequest
from baton.core.ids import AdapterRef, ModelVariant
from baton.router.input_processing.limits import check_name, is_valid_name
from baton.router.orders.node_orders import NodeStubs, answers
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.adapters import ADAPTER, MAX_NAMES, ORDER, NameOrder
from baton.rpc.errors import NoNodes, TooManyAdapters, TooManyUpdates, UnknownModel
from baton.rpc.security.token import NO_OPERATORS, Operators
from baton.rpc.status import RemoteError, remote_error
from baton.v1 import node_pb2

MAX_UPDATES = 32  # at a time
REFUSAL_PAUSE_S = 0.5
READ_TIMEOUT_S = 120.0  # of files that may be on a network
NAMES_TIMEOUT_S = 10.0  # of a call, and of an update's wait for nodes that do not answer
FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0  # before another try to send names to a node
# Codes of calls that another try may get through.
UNANSWERED = {StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED}
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Adapter to load."""

    name: str
    path: str  # relative to the nodes' --lora-root
    model: str = ""  # base; empty: the only one whose nodes serve adapters
    can_replace: bool = False


class AdapterUpdates:
    """Loads an adapter on all open nodes of a model: all read its files before it gets its name.

    A name is given or removed by an order. Nodes merge orders, and the last one of a name holds, so
    that none has to be undone. Nodes that were away or did not answer get their orders later.
    """

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
        self._stubs = NodeStubs(channel)
        self._can_send = operators.tokens is not None  # those of the nodes
        self._num_updates = 0
        self._sending: dict[Node, asyncio.Task[RemoteError | None]] = {}
        self._version: int | None = None  # of the adapters, at the last look

    def handle_reports(self) -> None:
        """Send nodes the orders that they lack: the table has changed."""
        if self._can_send and self._version != self._table.adapters.version:
            self._version = self._table.adapters.version
            for node in self._table.nodes:
                self._start_sending(node)

    async def load(self, order: AdapterOrder, shown: str | None = None) -> tuple[ModelVariant, int]:
        """Return the adapter and the number of its nodes. `shown` is the caller's authorization.

        When it returns, requests of this router can use the adapter. Raises NotAnOperator,
        TooManyUpdates, TooManyAdapters, and InvalidRequest and NodeFailed if a node cannot read it;
        then nothing has changed.
        """
        async with self._admitted(shown):
            nodes = self._nodes_for(order)
            adapter = await self._read(nodes, order)
            model = nodes[0].card.model
            self._check_name(order)  # others may have taken it meanwhile
            await self._set_name(model, order.name, adapter)
            return ModelVariant(model, adapter), len(nodes)

    async def unload(self, name: str, shown: str | None = None) -> int:
        """Return the number of nodes that had the adapter. Requests in progress keep it.

        An unknown name is removed as well: nodes that join later may have it. Raises NotAnOperator,
        TooManyUpdates, NoNodes and UnknownModel.
        """
        async with self._admitted(shown):
            variant = self._table.served.variants.get(name)
            served = self._table.served.listed()
            unknown = f"there is no adapter {_quoted(name)} here; served: {served}"
            if not is_valid_name(name) or (variant is not None and not variant.adapter.name):
                raise UnknownModel(unknown)
            num_nodes = self._table.adapters.nodes_with(name)
            models = {node.card.model for node in self._table.nodes if node.card.max_loras}
            for model in models if variant is None else {variant.base}:
                await self._set_name(model, name, None)
            if variant is None:
                raise UnknownModel(unknown)
            return num_nodes

    @asynccontextmanager
    async def _admitted(self, shown: str | None) -> AsyncGenerator[None]:
        """Raises NotAnOperator, NoNodes, and TooManyUpdates after a pause."""
        self._operators.check(shown)
        if not self._table.nodes:  # as after a restart: any may have the name
            raise NoNodes("no node has joined this router yet; send this again")
        if self._num_updates >= MAX_UPDATES:
            await asyncio.sleep(REFUSAL_PAUSE_S)  # a client that repeats it at once is slowed down
            raise TooManyUpdates(
                f"{MAX_UPDATES} loads and unloads of adapters are in progress; send this one again "
                "later"
            )
        self._num_updates += 1
        try:
            yield
        finally:
            self._num_updates -= 1

    async def _read(self, nodes: Sequence[Node], order: AdapterOrder) -> AdapterRef:
        """Have nodes read an adapter, and return it. Raises what names those that have not."""
        request = node_pb2.ReadAdapterRequest(name=order.name, path=order.path)
        outcomes = await self._stubs.call(
            nodes,
            lambda stub: stub.ReadAdapter(
                request, timeout=READ_TIMEOUT_S, metadata=self._operators.metadata
            ),
        )
        failed = f"cannot read adapter {order.name!r}, so nothing has changed"
        names_by_adapter: defaultdict[AdapterRef, list[str]] = defaultdict(list)
        for node, response in answers(outcomes, failed).items():
            names_by_adapter[ADAPTER.from_message(response.adapter)].append(node.card.node_id)
        if len(names_by_adapter) > 1:
            found = (f"{each.id[:12]} on {', '.join(on)}" for each, on in names_by_adapter.items())
            raise InvalidRequest(
                f"nodes read unlike adapters from {order.path!r} ({'; '.join(found)}), so nothing "
                "has changed: copy the same folder below the --lora-root of each node"
            )
        return next(iter(names_by_adapter))

    # --- orders -----------------------------------------------------------------------

    async def _set_name(self, model: str, name: str, adapter: AdapterRef | None) -> None:
        """Order what a name means, and wait until nodes know it, or do not answer.

        Raises what names nodes that refuse it.
        """
        number = self._table.adapters.next_number(name, self._clock_ns())
        self._table.note_name(model, NameOrder(name, number, adapter))
        nodes = [node for node in self._table.nodes if node.card.model == model]
        sending = {node: task for node in nodes if (task := self._start_sending(node))}
        if sending:
            await asyncio.wait(sending.values(), timeout=NAMES_TIMEOUT_S)
        outcomes = {node: task.result() for node, task in sending.items() if task.done()}
        answers(outcomes, f"refuse orders about {name!r}")

    def _start_sending(self, node: Node) -> asyncio.Task[RemoteError | None] | None:
        """Send a node what it lacks, unless that is in progress. None: it lacks nothing."""
        task = self._sending.get(node)
        if task is None and self._lacking(node):
            task = self._sending[node] = asyncio.ensure_future(self._send(node))
        return task

    async def _send(self, node: Node) -> RemoteError | None:
        """Send a node the orders that it lacks, until it has all of them, refuses or is lost."""
        pause_s = FIRST_PAUSE_S
        try:
            while orders := self._lacking(node):
                error = await self._send_once(node, orders)
                if error is None:
                    continue
                log.warning("%s does not take names of adapters: %s", node.card.node_id, error)
                if error.code not in UNANSWERED:
                    return error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            del self._sending[node]
        return None

    async def _send_once(self, node: Node, orders: list[NameOrder]) -> RemoteError | None:
        request = node_pb2.SetAdapterNamesRequest(names=map(ORDER.to_message, orders))
        try:
            await self._stubs.of(node).SetAdapterNames(
                request, timeout=NAMES_TIMEOUT_S, metadata=self._operators.metadata
            )
        except RpcError as error:
            return remote_error(error)
        if self._lacking(node):
            self._table.adapters.note_sent(node.address, orders)
        return None

    def _lacking(self, node: Node) -> list[NameOrder]:
        """Return the orders that a node does not have, unless it is lost."""
        is_there = self._table.node_at(node.address) == node and node.card.max_loras
        return self._table.adapters.lacking(node.address) if is_there else []

    # --- checks -----------------------------------------------------------------------

    def _check_name(self, order: AdapterOrder) -> None:
        """Raises InvalidRequest, also if the name is taken."""
        if not order.name or not order.path:
            raise InvalidRequest("both the name and the path of an adapter must be given")
        check_name("name", order.name)
        check_name("path", order.path)
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

    def _nodes_for(self, order: AdapterOrder) -> list[Node]:
        """Return the nodes that are to read an adapter. Raises what names the remedy."""
        self._check_name(order)
        served = self._table.served
        taken = served.variants.get(order.name)
        model = order.model or ("" if taken is None else taken.base)
        if model and model not in served.bases:
            raise UnknownModel(f"model {_quoted(model)} is not served here: {served.listed()}")
        able = [
            node
            for node in sorted(self._table.nodes, key=lambda node: node.card.node_id)
            if node.card.max_loras and self._table.is_open(node)
        ]
        models = sorted({model} if model else {node.card.model for node in able})
        if len(models) > 1:
            raise InvalidRequest(f"set model to that of the adapter: {', '.join(models)}", "model")
        nodes = [node for node in able if node.card.model in models]
        if not nodes:
            raise InvalidRequest(
                "no open node takes adapters of this model: start the nodes with --lora-root"
            )
        if taken is None and self._table.adapters.num_named(models[0]) >= MAX_NAMES:
            raise TooManyAdapters(
                f"{MAX_NAMES} adapters of {models[0]} have names, which is the limit: unload one"
            )
        return nodes


def _quoted(name: str) -> str:
    """Return a name that a client has sent, as part of an error."""
    return repr(name) if is_valid_name(name) else "of this name"
