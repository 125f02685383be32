"""Watches nodes and keeps the node table up to date: reachability, load, health, prefixes."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from grpc import RpcError, StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.legs import LegKind, role_of
from baton.router.discovery.node_reports import Membership
from baton.router.discovery.resolver import Find, find_addresses, follow
from baton.router.discovery.sources import NodeSource
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.routing.node_table import NodeTable
from baton.router.routing.served_models import Node
from baton.rpc.cached_prefixes import PrefixGap
from baton.rpc.errors import OtherVersion, ServiceError
from baton.rpc.node_info import (
    GET_NODE,
    LOAD,
    NodeCard,
    adapters_from,
    card_from,
    changes_from,
)
from baton.rpc.status import remote_error
from baton.v1 import node_pb2, node_pb2_grpc

# Pause before a node that returned an error is called again. gRPC itself reconnects to a node
# that is unreachable.
RETRY_S = 1.0
# A connection takes memory at both ends, so large clusters are not connected completely.
MAX_PAIRS = 16

OnChange = Callable[[], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeDiscovery:
    """Sources of nodes, and how often to resolve them."""

    leg_by_source: Mapping[NodeSource, LegKind]
    every_s: float = 5.0
    find: Find = find_addresses


@asynccontextmanager
async def watching(
    discovery: NodeDiscovery, table: NodeTable, node_calls: GrpcNodeCalls, on_change: OnChange
) -> AsyncIterator[None]:
    """Find and watch nodes until the end of the block."""
    watcher = NodeWatcher(discovery, table, node_calls, on_change)
    tasks = [
        asyncio.ensure_future(follow(source, discovery.find, discovery.every_s, watcher.found))
        for source in discovery.leg_by_source
    ]
    for task in tasks:
        task.add_done_callback(_log_bug)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await watcher.close()


class PeerWarmups:
    """Connects pairs of nodes when they join, so that their first hand-off does not wait for it."""

    def __init__(self, table: NodeTable, node_calls: GrpcNodeCalls) -> None:
        self._table = table
        self._node_calls = node_calls
        self._tasks: set[asyncio.Task[None]] = set()

    def warm_up(self, node: Node) -> None:
        """Connect a new node with those that it hands KV to or receives it from."""
        pairs = self._table.pairs_with(node)
        for decode, prefill in random.sample(pairs, min(len(pairs), MAX_PAIRS)):
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


class NodeWatcher:
    """Watch tasks, one for each address that is listed or reachable."""

    def __init__(
        self,
        discovery: NodeDiscovery,
        table: NodeTable,
        node_calls: GrpcNodeCalls,
        on_change: OnChange,
    ) -> None:
        self._discovery = discovery
        self._table = table
        self._node_calls = node_calls
        self._on_change = on_change
        self._membership = Membership()
        self._peer_warmups = PeerWarmups(table, node_calls)
        self._leg_by_address: dict[str, LegKind] = {}  # for which each was first listed
        self._task_by_address: dict[str, asyncio.Task[None]] = {}

    async def found(self, source: NodeSource, addresses: frozenset[str]) -> None:
        kind = self._discovery.leg_by_source[source]
        for address in addresses:
            self._leg_by_address.setdefault(address, kind)
        self._membership.set_listed(source, addresses)
        await self._apply_membership()

    async def close(self) -> None:
        await self._peer_warmups.close()
        tasks = list(self._task_by_address.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _apply_membership(self) -> None:
        """Start and stop watches, and mark unlisted nodes in the table."""
        watched = self._membership.watched
        for address in watched - self._task_by_address.keys():
            task = asyncio.ensure_future(self._watch(address))
            task.add_done_callback(_log_bug)
            self._task_by_address[address] = task
        for address in self._task_by_address.keys() - watched:
            self._cancel_unless_current(self._task_by_address.pop(address))
            del self._leg_by_address[address]
            self._node_calls.forget(address)
        self._table.watched = dict(self._leg_by_address)
        self._table.note_unlisted(self._membership.unlisted)
        await self._on_change()

    def _cancel_unless_current(self, task: asyncio.Task[None]) -> None:
        if task is not asyncio.current_task():  # the current task ends by itself
            task.cancel()

    async def _watch(self, address: str) -> None:
        """Watch an address for as long as it is listed or reachable."""
        while self._task_by_address.get(address) is asyncio.current_task():
            try:
                await self._watch_once(address)
            except RpcError as error:
                log.warning("lost the node at %s: %s", address, remote_error(error).message)
            except OtherVersion as error:
                log.error("the node at %s is not used: %s", address, error)
            except PrefixGap as gap:
                log.warning("restarting the watch of %s: %s", address, gap)
                continue  # it is reachable, and joins again
            if self._membership.is_reachable(address):
                self._table.lose(address)
                self._membership.note_lost(address)
                await self._apply_membership()
            await asyncio.sleep(RETRY_S)

    async def _watch_once(self, address: str) -> None:
        """Watch one process of a node until it ends or the connection breaks.

        Raises RpcError, OtherVersion and PrefixGap.
        """
        channel = self._node_calls.channel(address)
        stub = node_pb2_grpc.NodeServiceStub(channel)
        card = await self._fetch_card(address, stub)
        async with _health_at(channel) as health:
            if not await _wait_until_healthy(health):
                return
            async with _updates_of(stub) as updates:
                # With its adapters, so that requests for them are not refused until they arrive.
                first = await anext(updates, None)
                if first is None:
                    return
                self._join(address, card)
                self._note_update(address, first)
                await self._on_change()
                await _run_until_first_end(
                    self._follow_load(address, updates), self._follow_health(address, health)
                )

    async def _fetch_card(self, address: str, stub: node_pb2_grpc.NodeServiceAsyncStub) -> NodeCard:
        """Wait until the node is reachable and return its card. TLS errors are logged once.

        Raises RpcError and OtherVersion.
        """
        try:
            return card_from(await stub.GetNode(GET_NODE))
        except RpcError as error:
            failure = remote_error(error)
            if failure.code is not StatusCode.UNAVAILABLE:
                raise
        trouble = self._node_calls.connection_trouble(address, failure.message)
        if trouble is not None:
            log.error("%s node: %s", self._leg_by_address[address].value, trouble)
        return card_from(await stub.GetNode(GET_NODE, wait_for_ready=True))

    def _join(self, address: str, card: NodeCard) -> None:
        for other in self._table.nodes:
            if other.card.node_id == card.node_id and other.address != address:
                log.warning(
                    "%s, known from %s, joins from %s: it moved, has two addresses, or two nodes "
                    "have one name (--node-id); the last to join gets the requests",
                    *(card.node_id, other.address, address),
                )
        self._table.join(address, card)
        self._membership.note_joined(address)
        self._peer_warmups.warm_up(Node(address, card))
        log.info("%s node %s joined from %s", role_of(card.legs), card.node_id, address)

    async def _follow_load(
        self, address: str, updates: AsyncIterator[node_pb2.WatchResponse]
    ) -> None:
        async for update in updates:
            self._note_update(address, update)
            await self._on_change()

    def _note_update(self, address: str, update: node_pb2.WatchResponse) -> None:
        """Record what a node reports. Raises PrefixGap."""
        before = self._table.node_at(address)
        self._table.note_load(address, LOAD.from_message(update))
        node = self._table.node_at(address)
        if node is not None and node != before:  # it offers other legs
            log.info("%s is a %s node now", address, role_of(node.card.legs))
            self._peer_warmups.warm_up(node)
        changes, adapters = changes_from(update), adapters_from(update)
        if changes is not None:
            self._table.note_prefixes(address, changes)
        if adapters is not None:
            self._table.note_adapters(address, adapters)

    async def _follow_health(self, address: str, health: AsyncIterator[bool]) -> None:
        async for is_healthy in health:
            self._table.note_ready(address, is_ready=is_healthy)
            await self._on_change()


@asynccontextmanager
async def _updates_of(
    stub: node_pb2_grpc.NodeServiceAsyncStub,
) -> AsyncIterator[AsyncIterator[node_pb2.WatchResponse]]:
    """Yield the node's reports: all of it now, then each change."""
    watch = stub.Watch(node_pb2.WatchRequest())
    try:
        yield aiter(watch)
    finally:
        watch.cancel()


@asynccontextmanager
async def _health_at(channel: aio.Channel) -> AsyncIterator[AsyncIterator[bool]]:
    """Yield the health of the node: now, and at each change."""
    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    serving = health_pb2.HealthCheckResponse.SERVING
    try:
        async with aclosing(update.status == serving async for update in watch) as health:
            yield health
    finally:
        watch.cancel()


async def _wait_until_healthy(health: AsyncIterator[bool]) -> bool:
    """Wait until the node is healthy. Return False if the watch ends first."""
    while (is_healthy := await anext(health, None)) is not None:
        if is_healthy:
            return True
    return False


async def _run_until_first_end(*jobs: Coroutine[None, None, None]) -> None:
    """Run jobs concurrently until one ends, cancel the others, and raise its error."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()


def _log_bug(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("the watch of a node stopped because of a bug", exc_info=task.exception())
