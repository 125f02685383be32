"""Nodes that load adapters, with real gRPC servers, whose adapters are texts instead of weights."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS
from baton.client import AsyncClient
from baton.core.ids import AdapterRef
from baton.core.legs import GENERATING, LegKind
from baton.engine.engine_thread import EngineThread
from baton.node.adapters.config import AdapterFolder
from baton.node.adapters.loader import AdapterLoader, ReadAdapter
from baton.node.adapters.registry import AdapterRegistry
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.servicer import NodeServicer
from baton.node.state import NodeState, NodeUpdate
from baton.router.discovery.node_reports import report_nodes
from baton.router.discovery.sources import DnsName, NodeSource
from baton.router.discovery.watcher import NodeDiscovery, watching
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.doors.grpc.cluster_servicer import ClusterServicer
from baton.router.orders.adapter_updates import AdapterUpdates
from baton.router.orders.node_orders import NodeOrders
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.adapters import NameOrder
from baton.rpc.channel import open_channel
from baton.rpc.errors import AdapterUnreadable
from baton.rpc.node_info import NodeCard, NodeLoad
from baton.rpc.security.token import AcceptedTokens, Operators
from baton.rpc.server import Service, serving
from baton.v1 import cluster_pb2_grpc, node_pb2_grpc
from tests.support.engines import an_engine
from tests.support.node_calls import a_card

OPERATORS = Operators(AcceptedTokens(("operator",)))
NUM_PLACES = 16
PATIENCE_S = 60


def adapter_id(weights: str) -> str:
    return hashlib.sha256(weights.encode()).hexdigest()


class TextMemory:
    """Implements `AdapterMemory`."""

    def __init__(self) -> None:
        self.loaded: dict[str, str] = {}
        self.faults: list[Exception] = []  # of the next reads
        self.may_read = threading.Event()  # clear: reads take long
        self.may_read.set()

    def digest(self, folder: Path) -> str:
        return adapter_id((folder / WEIGHTS).read_text())

    def read(self, folder: Path, adapter_id: str) -> ReadAdapter:
        self.may_read.wait()
        if self.faults:
            raise self.faults.pop(0)
        if self.digest(folder) != adapter_id:
            raise AdapterUnreadable(f"the files in {folder} have changed")
        weights = (folder / WEIGHTS).read_text()
        return ReadAdapter(len(weights), lambda: self.loaded.update({adapter_id: weights}))

    def remove(self, adapter_id: str) -> None:
        del self.loaded[adapter_id]


class FailingRegistry(AdapterRegistry):
    """Registry that can fail to take names."""

    faults: list[Exception]  # of the next orders

    def set_names(self, orders: Sequence[NameOrder]) -> None:
        if self.faults:
            raise self.faults.pop(0)
        super().set_names(orders)


class AdapterNode:
    """Node without an engine."""

    def __init__(self, card: NodeCard, root: Path, operators: Operators) -> None:
        self.card = card
        self.root = root
        self.memory = TextMemory()
        self.may_report = asyncio.Event()  # clear: its reports are late
        self.may_report.set()
        loader = AdapterLoader(self.memory, NUM_PLACES)
        changes = NodeChanges()
        self.name_faults: list[Exception] = []  # of the next orders about names
        self.registry = FailingRegistry(loader, root, card.model, changes.notify)
        self.registry.faults = self.name_faults
        calls = EngineCalls(EngineThread(an_engine()), changes)
        self.state = NodeState(
            card, calls, self._read_update, adapters=self.registry if card.max_loras else None
        )
        self._servicer = NodeServicer(self.state, _reset_nothing, _pause_nothing, operators)

    def write(self, path: str, weights: str) -> None:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text("{}")
        (folder / WEIGHTS).write_text(weights)

    def delete(self, path: str) -> None:
        (self.root / path / WEIGHTS).unlink()

    def restart(self, *folders: AdapterFolder) -> None:
        """Forget all adapters, as a new process, which gets some at its start."""
        self.memory.loaded.clear()
        self.registry = self.state.adapters = FailingRegistry(
            AdapterLoader(self.memory, NUM_PLACES), self.root, self.card.model
        )
        self.registry.faults = self.name_faults
        self.registry.read_at_start(folders)

    @property
    def adapters(self) -> dict[str, AdapterRef]:
        """Adapters by name."""
        return {adapter.name: adapter for adapter in self.registry.report().named}

    async def load(self, name: str, path: str) -> None:
        """Give a name to an adapter, as an operator of this node alone long ago."""
        adapter = await self.registry.read(path, name)
        self.registry.set_names([NameOrder(name, 1, adapter)])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the node and yield its address."""
        service = Service(
            "baton.v1.NodeService",
            lambda server: node_pb2_grpc.add_NodeServiceServicer_to_server(self._servicer, server),
        )
        publishing = asyncio.ensure_future(self.state.publish_updates())
        try:
            with self.registry.loader:
                async with serving("127.0.0.1", 0, [service]) as server:
                    await server.health.set_ready(True)
                    yield server.address
        finally:
            publishing.cancel()

    async def _read_update(self) -> NodeUpdate:
        await self.may_report.wait()
        return NodeUpdate(NodeLoad())


async def _reset_nothing(tiers: object, *, reset_running: bool = False) -> dict[str, int]:
    return {}


async def _pause_nothing(_: object) -> None: ...


@dataclass(slots=True)
class AdapterCluster:
    """Nodes with adapters, and the parts of a router that watches them."""

    nodes: list[AdapterNode]
    table: NodeTable
    updates: AdapterUpdates
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    addresses: dict[str, str] = field(default_factory=dict)  # of nodes that were lost

    def node(self, name: str) -> Node:
        return next(node for node in self.table.nodes if node.card.node_id == name)

    def lose(self, name: str) -> AdapterNode:
        """Let the router lose the connection to a node."""
        lost = next(node for node in self.nodes if node.card.node_id == name)
        self.addresses[name] = self.node(name).address
        self.table.lose(self.addresses[name])
        self.updates.handle_reports()
        return lost

    def join(self, node: AdapterNode) -> None:
        """Let a node that was lost join again, with its report."""
        address = self.addresses[node.card.node_id]
        self.table.join(address, node.card)
        self.table.note_adapters(address, node.registry.report())
        self.updates.handle_reports()

    @property
    def held(self) -> dict[str, set[str]]:
        """Names of adapters by node."""
        return {node.card.node_id: {*node.adapters} for node in self.nodes}

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(is_so)


def adapter_cards(*, max_loras: int = 4, num_each: int = 1) -> list[NodeCard]:
    return [
        replace(a_card(role, f"{role.value}-{number}"), max_loras=max_loras)
        for role in GENERATING
        for number in range(num_each)
    ]


@asynccontextmanager
async def adapter_cluster(
    files: Mapping[str, str],
    *,
    cards: list[NodeCard] | None = None,
    operators: Operators = OPERATORS,
    node_operators: Operators = OPERATORS,
) -> AsyncIterator[AdapterCluster]:
    """Serve nodes with these files, watched by a router that has found all of them."""
    async with AsyncExitStack() as lifetime:
        nodes: list[AdapterNode] = []
        sources: dict[NodeSource, LegKind] = {}
        found: dict[NodeSource, frozenset[str]] = {}
        for place, card in enumerate(cards or adapter_cards()):
            root = Path(lifetime.enter_context(TemporaryDirectory()))
            node = AdapterNode(card, root, node_operators)
            for path, weights in files.items():
                node.write(path, weights)
            nodes.append(node)
            source = DnsName(f"node-{place}", 1)
            sources[source] = card.legs[0]
            found[source] = frozenset({await lifetime.enter_async_context(node.serving())})
        table = NodeTable()
        node_calls = await lifetime.enter_async_context(GrpcNodeCalls())
        updates = AdapterUpdates(table, node_calls.channel, operators)
        cluster = AdapterCluster(nodes, table, updates)

        async def find(source: NodeSource) -> frozenset[str]:
            return found[source]

        async def note_change() -> None:
            updates.handle_reports()
            async with cluster.changed:
                cluster.changed.notify_all()

        discovery = NodeDiscovery(sources, 0.01, find)
        await lifetime.enter_async_context(watching(discovery, table, node_calls, note_change))
        await cluster.until(lambda: len(table.nodes) == len(nodes))
        yield cluster


def run_scenario(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(within())


@asynccontextmanager
async def operator_client(
    cluster: AdapterCluster, operators: Operators = OPERATORS, token: str = "operator"
) -> AsyncIterator[AsyncClient]:
    """Serve the calls of operators, as a router does, and yield a client of them."""
    servicer = ClusterServicer(
        partial(report_nodes, cluster.table),
        NodeOrders(cluster.table, open_channel, operators),
        cluster.updates,
    )
    service = Service(
        "baton.v1.ClusterService",
        lambda server: cluster_pb2_grpc.add_ClusterServiceServicer_to_server(servicer, server),
    )
    async with (
        serving("127.0.0.1", 0, [service]) as server,
        AsyncClient(server.address, token=token) as client,
    ):
        yield client
