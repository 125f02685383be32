"""Loads and unloads of adapters through routers that share nodes, while nodes and routers come and
go: when all is quiet, the last order of each name holds everywhere.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

from grpc import StatusCode, aio
from grpc.aio import AioRpcError, Metadata
from hypothesis import example, given
from hypothesis import strategies as st

from baton.core.errors import NamedError
from baton.core.ids import NO_ADAPTER, AdapterRef, Incarnation, NodeId
from baton.core.legs import LegKind
from baton.router.orders import adapter_updates
from baton.router.orders.adapter_updates import AdapterOrder, AdapterUpdates
from baton.router.routing.node_table import NodeTable
from baton.rpc.adapters import ADAPTER, ORDER, AdapterNames, NameOrder, NodeAdapters
from baton.rpc.security.token import AcceptedTokens, Operators
from baton.v1 import node_pb2
from tests.support.node_calls import a_card

OPERATORS, TOKEN = Operators(AcceptedTokens(("operator",))), "Bearer operator"
NAMES, PATHS = ("sql", "chat"), ("old", "new", "missing")
AT_START = "start"  # folder of `--lora`
MISSING = "missing"  # a folder that one node does not have
NUM_NODES, NUM_ROUTERS, NUM_ROUNDS = 3, 2, 100
NUM_DELAYS = NUM_NODES * NUM_ROUTERS


class SimulatedNode:
    """Names of a node's process, and its answers to routers."""

    def __init__(self, number: int) -> None:
        self.number, self.num_starts = number, 0
        self.address = f"node-{number}:1"
        self.is_failing = False
        self.delays: deque[int] = deque()  # of the next calls, in turns of the event loop
        self.report: Callable[[SimulatedNode], None] = lambda _: None
        self.start()

    def start(self, *names: str) -> None:
        self.num_starts += 1
        self.names = AdapterNames()
        for name in names:
            self.names.merge(NameOrder(name, 0, AdapterRef(name, f"id-{AT_START}", AT_START)))

    @property
    def reported(self) -> NodeAdapters:
        return NodeAdapters(tuple(self.names.orders.values()))

    async def read(self, request: node_pb2.ReadAdapterRequest) -> node_pb2.ReadAdapterResponse:
        await self._begin()
        if request.path == MISSING and self.number == 0:
            raise _error(StatusCode.INVALID_ARGUMENT)
        adapter = AdapterRef(request.name, f"id-{request.path}", request.path)
        return node_pb2.ReadAdapterResponse(adapter=ADAPTER.to_message(adapter))

    async def set_names(self, request: node_pb2.SetAdapterNamesRequest) -> None:
        await self._begin()
        for order in request.names:
            self.names.merge(ORDER.from_message(order))
        self.report(self)

    async def _begin(self) -> None:
        for _ in range(self.delays.popleft() if self.delays else 1):
            await asyncio.sleep(0)
        if self.is_failing:
            raise _error(StatusCode.UNAVAILABLE)


def _error(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata())


class SimulatedChannel:
    """Implements the part of `aio.Channel` that stubs use."""

    def __init__(self, node: SimulatedNode) -> None:
        self._calls: dict[str, Any] = {
            "ReadAdapter": node.read,
            "SetAdapterNames": node.set_names,
        }

    def unary_unary(self, path: str, **_: Any) -> Callable[..., Any]:
        call = self._calls.get(path.rpartition("/")[2])
        return lambda request, **_: call(request) if call else None

    def unary_stream(self, path: str, **_: Any) -> None: ...

    def stream_stream(self, path: str, **_: Any) -> None: ...


class World:
    """Nodes, routers, and the orders that they know."""

    def __init__(self) -> None:
        self._now_ns = 0
        self.nodes = [SimulatedNode(number) for number in range(NUM_NODES)]
        for node in self.nodes:
            node.report = self._report
        self.tables: list[NodeTable] = []
        self.updates: list[AdapterUpdates] = []
        self.known: list[AdapterNames] = []  # by routers
        self.tasks: list[asyncio.Task[object]] = []
        for _ in range(NUM_ROUTERS):
            self._start_router(len(self.tables))

    async def load(self, router: int, name: str, path: str) -> None:
        order = AdapterOrder(name, path, can_replace=True)
        await self._send(self.updates[router].load(order, TOKEN))

    async def unload(self, router: int, name: str) -> None:
        await self._send(self.updates[router].unload(name, TOKEN))

    async def send_at_once(self, name: str, paths: tuple[str, str], delays: list[int]) -> None:
        """Send orders about a name through both routers; they reach nodes in any order."""
        for delay, node in zip(delays, self.nodes * NUM_ROUTERS, strict=True):
            node.delays.append(delay)
        self.tasks.append(asyncio.ensure_future(self.load(0, name, paths[0])))
        await (self.load(1, name, paths[1]) if paths[1] else self.unload(1, name))

    async def join(self, router: int, node: int) -> None:
        self._lose(router, node)
        process = self.nodes[node]
        card = replace(
            a_card(LegKind.DECODE),
            max_loras=4,
            node_id=NodeId(f"node-{node}"),
            incarnation=Incarnation(f"{node}-{process.num_starts}"),
        )
        self.tables[router].join(process.address, card)
        self._note(router, process)

    async def lose(self, router: int, node: int) -> None:
        self._lose(router, node)

    async def restart_node(self, node: int, names: tuple[str, ...]) -> None:
        self.nodes[node].start(*names)
        self._reconnect(node)

    async def restart_router(self, router: int) -> None:
        if router == 0:  # what it has sent already can still arrive
            while self.tasks:
                self.tasks.pop().cancel()
        self._start_router(router)

    async def fail(self, node: int) -> None:
        self.nodes[node].is_failing = True

    async def recover(self, node: int) -> None:
        self.nodes[node].is_failing = False
        self._reconnect(node)

    async def settle(self) -> None:
        for _ in range(NUM_ROUNDS):
            await asyncio.sleep(0)

    async def connect_all(self) -> None:
        for number, node in enumerate(self.nodes):
            if node.is_failing:
                await self.recover(number)
            for router, table in enumerate(self.tables):
                if table.node_at(node.address) is None:
                    await self.join(router, number)
        await self.settle()

    def last_order(self, name: str) -> NameOrder:
        """Return the last order about a name that a process knows."""
        known = [*self.known, *(node.names for node in self.nodes)]
        orders = [each.orders.get(name, NameOrder(name)) for each in known]
        return max(orders, key=_rank)

    async def _send(self, order: Any) -> None:
        with suppress(NamedError):  # a node that refuses or fails, or none
            await order

    def _start_router(self, router: int) -> None:
        if router < len(self.tables):
            for node in self.nodes:  # the process that has ended sends nothing any more
                self.tables[router].lose(node.address)
        table, known = NodeTable(), AdapterNames()
        note_name = table.note_name

        def observe(model: str, order: NameOrder) -> None:
            known.merge(order)
            note_name(model, order)

        cast("Any", table).note_name = observe
        channels = {node.address: SimulatedChannel(node) for node in self.nodes}
        updates = AdapterUpdates(
            table,
            lambda address: cast("aio.Channel", channels[address]),
            OPERATORS,
            clock_ns=self._clock_ns,
        )
        for each, new in ((self.tables, table), (self.updates, updates), (self.known, known)):
            cast("list[Any]", each)[router : router + 1] = [new]

    def _clock_ns(self) -> int:
        self._now_ns += 2
        return self._now_ns

    def _reconnect(self, node: int) -> None:
        for router in range(NUM_ROUTERS):
            self._lose(router, node)

    def _lose(self, router: int, node: int) -> None:
        self.tables[router].lose(self.nodes[node].address)
        self.updates[router].handle_reports()

    def _report(self, node: SimulatedNode) -> None:
        for router, table in enumerate(self.tables):
            if table.node_at(node.address) is not None:
                self._note(router, node)

    def _note(self, router: int, node: SimulatedNode) -> None:
        self.tables[router].note_adapters(node.address, node.reported)
        for order in node.names.orders.values():
            self.known[router].merge(order)
        self.updates[router].handle_reports()


def _rank(order: NameOrder) -> tuple[int, str, str]:
    return order.rank


def steps() -> Iterator[st.SearchStrategy[tuple[Any, ...]]]:
    routers, nodes = st.integers(0, NUM_ROUTERS - 1), st.integers(0, NUM_NODES - 1)
    names, paths = st.sampled_from(NAMES), st.sampled_from(PATHS)
    yield st.tuples(st.just(World.load), routers, names, paths)
    yield st.tuples(st.just(World.unload), routers, names)
    both = st.tuples(paths, st.sampled_from((*PATHS, "")))
    delays = st.lists(st.integers(0, 9), min_size=NUM_DELAYS, max_size=NUM_DELAYS)
    yield st.tuples(st.just(World.send_at_once), names, both, delays)
    yield st.tuples(st.just(World.join), routers, nodes)
    yield st.tuples(st.just(World.lose), routers, nodes)
    yield st.tuples(st.just(World.restart_node), nodes, st.sampled_from([(), NAMES[:1], NAMES]))
    yield st.tuples(st.just(World.restart_router), routers)
    yield st.tuples(st.just(World.fail), nodes)
    yield st.tuples(st.just(World.recover), nodes)
    yield st.tuples(st.just(World.settle))


# Node 0 was away, and cannot read what has replaced its adapter.
REPLACED_WITHOUT_NODE_0 = [
    (World.load, 0, "sql", "old"),
    (World.lose, 0, 0),
    (World.lose, 1, 0),
    (World.load, 0, "sql", MISSING),
]


@given(st.lists(st.one_of(*steps()), max_size=20))
@example(REPLACED_WITHOUT_NODE_0)
def test_when_all_is_quiet_the_last_order_of_each_name_holds(history: list[Any]) -> None:
    async def scenario() -> None:
        world = World()
        for router in range(NUM_ROUTERS):
            for node in range(NUM_NODES):
                await world.join(router, node)
        for do, *values in history:
            await do(world, *values)
        await world.settle()
        last = {name: world.last_order(name) for name in NAMES}
        await world.connect_all()

        assert all(task.done() for task in world.tasks)
        for name, order in last.items():
            held = {node.names.find(name) for node in world.nodes}
            served = {table.find_model(name).adapter for table in world.tables}
            if order.number:
                assert held == {order.adapter}
            else:  # nodes keep the names of their starts to themselves
                assert held <= {order.adapter, None}
            assert served == {max(held, key=bool) or NO_ADAPTER}

    with patch.multiple(adapter_updates, FIRST_PAUSE_S=0, NAMES_TIMEOUT_S=0):
        asyncio.run(scenario())
