"""Keeps the table of nodes true: who is there, how busy, who is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from grpc import RpcError

from baton.v1 import node_pb2, node_pb2_grpc
from router.node_calls import GrpcNodeCalls
from router.nodes import NodeTable
from serving.node import NodeRole, card_from, changes_from, load_from
from serving.prefixes import PrefixGap
from serving.status import remote_error

# How soon a node that answered with an error is asked again; one that cannot be reached is
# found again by its channel.
RETRY_S = 1.0

OnChange = Callable[[], Awaitable[None]]

log = logging.getLogger(__name__)


@asynccontextmanager
async def watching(
    addresses: Sequence[tuple[NodeRole, str]],
    table: NodeTable,
    node_calls: GrpcNodeCalls,
    on_change: OnChange,
) -> AsyncIterator[None]:
    """Watches every address from here to the end of the block."""
    watches = [
        asyncio.ensure_future(_watch_for_ever(role, address, table, node_calls, on_change))
        for role, address in addresses
    ]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _watch_for_ever(
    role: NodeRole,
    address: str,
    table: NodeTable,
    node_calls: GrpcNodeCalls,
    on_change: OnChange,
) -> None:
    stub = node_pb2_grpc.NodeServiceStub(node_calls.channel(address))
    while True:
        try:
            await _watch_once(role, address, table, stub, on_change)
        except RpcError as error:
            log.warning("lost %s node %s: %s", role.value, address, remote_error(error).message)
        except PrefixGap as gap:
            log.warning("the watch of %s node %s begins again: %s", role.value, address, gap)
            continue  # it is there, and joins anew
        table.lose(address)
        await on_change()
        await asyncio.sleep(RETRY_S)


async def _watch_once(
    role: NodeRole,
    address: str,
    table: NodeTable,
    stub: node_pb2_grpc.NodeServiceAsyncStub,
    on_change: OnChange,
) -> None:
    """One life of one node's process."""
    card = card_from(await stub.GetNode(node_pb2.GetNodeRequest(), wait_for_ready=True))
    if card.role is not role:
        log.error("%s is a %s node, not a %s node", address, card.role.value, role.value)
        return
    table.join(address, card)
    log.info("%s node %s joined from %s", role.value, card.node_id, address)
    await on_change()
    async for message in stub.Watch(node_pb2.WatchRequest()):
        table.note_load(address, load_from(message))
        changes = changes_from(message)
        if changes is not None:
            table.note_prefixes(address, changes)
        await on_change()
