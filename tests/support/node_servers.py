"""Nodes with real gRPC servers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from baton.core.ids import Incarnation
from baton.core.legs import LegKind
from baton.engine.core import EngineCore
from baton.engine.engine_thread import EngineThread
from baton.engine.errors import EngineStopped
from baton.kv_transfer.external_kv import KV
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.observers.tracing import NO_TRACING, NodeTracing
from baton.node.operator_orders import set_pause
from baton.node.servicer import CallServer, LegServicer, NodeServicer, RequestLedger
from baton.node.state import NodeState, NodeUpdate
from baton.prefill_node.leg import PrefillLegs
from baton.rpc.health import Health
from baton.rpc.node_info import NodeLoad
from baton.rpc.security.token import NO_OPERATORS, Operators
from baton.rpc.server import Service, serving
from baton.v1 import node_pb2_grpc
from tests.support.engines import an_engine
from tests.support.node_calls import a_card


@dataclass(frozen=True, slots=True)
class NodeServer:
    address: str
    state: NodeState
    health: Health
    connected: asyncio.Queue[str]  # prefill nodes that it was ordered to connect to
    resets: list[int]  # of its prefix cache: how many blocks each dropped


@asynccontextmanager
async def a_node_server(
    role: LegKind = LegKind.DECODE,
    name: str = "",
    *,
    port: int = 0,
    incarnation: str = "1",
    core: EngineCore | None = None,
    tracing: NodeTracing = NO_TRACING,
    num_cached_blocks: int | None = 7,  # None: its engine has stopped
    operators: Operators = NO_OPERATORS,
    shared_tiers: frozenset[str] = frozenset(),
) -> AsyncIterator[NodeServer]:
    """Serve a healthy idle node. An engine runs only if one is given."""
    card = replace(a_card(role, name), incarnation=Incarnation(incarnation))
    served = core or an_engine()
    engine = EngineThread(served)
    calls = EngineCalls(engine, NodeChanges())
    state = NodeState(card, calls, _no_news)
    connected: asyncio.Queue[str] = asyncio.Queue()
    resets: list[int] = []
    node = NodeServicer(
        state,
        partial(_reset, resets, num_cached_blocks),
        partial(set_pause, engine, served.scheduler),
        operators,
        shared_tiers,
    )
    ledger = RequestLedger(on_change=lambda: None)
    prefills = PrefillLegs(lambda handoff_id: None)
    legs = LegServicer(CallServer(state, ledger, prefills, tracing), state, connected.put)
    services = [
        Service(
            "baton.v1.NodeService",
            lambda server: node_pb2_grpc.add_NodeServiceServicer_to_server(node, server),
        ),
        Service(
            "baton.v1.LegService",
            lambda server: node_pb2_grpc.add_LegServiceServicer_to_server(legs, server),
        ),
    ]
    following = asyncio.ensure_future(state.publish_updates())
    try:
        async with serving("127.0.0.1", port, services) as server:
            await server.health.set_ready(True)
            with ExitStack() as running:
                if core is not None:
                    running.enter_context(engine)
                    running.enter_context(calls)
                yield NodeServer(server.address, state, server.health, connected, resets)
    finally:
        following.cancel()


async def _reset(
    resets: list[int],
    num_cached_blocks: int | None,
    tiers: Collection[str],
    *,
    reset_running: bool = False,
) -> dict[str, int]:
    if num_cached_blocks is None:
        raise EngineStopped("the engine of this node has stopped")
    resets.append(num_cached_blocks)
    return dict.fromkeys(tiers or (KV,), num_cached_blocks)


async def _no_news() -> NodeUpdate:
    return NodeUpdate(NodeLoad())
