"""Node discovery of the router over real gRPC: nodes join, fail, restart and leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.legs import LegKind
from baton.router.discovery.resolver import SourceFailed
from baton.router.discovery.sources import DnsName, NodeSource
from baton.router.discovery.watcher import NodeDiscovery, watching
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.routing.node_table import NodeTable
from baton.rpc.security.tls import PLAIN, TlsConfig
from tests.support.certificates import make_authority
from tests.support.node_servers import a_node_server

PATIENCE_S = 60
DECODES, PREFILLS = DnsName("decode", 5), DnsName("prefill", 5)


@dataclass(slots=True)
class View:
    """Node table kept up to date from the addresses that a test publishes."""

    named: dict[NodeSource, frozenset[str]] = field(default_factory=dict)
    table: NodeTable = field(default_factory=NodeTable)
    node_calls: GrpcNodeCalls = field(default_factory=GrpcNodeCalls)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def find(self, source: NodeSource) -> frozenset[str]:
        if source not in self.named:
            raise SourceFailed("no such name")
        return self.named[source]

    async def note_change(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def open_names(self, role: LegKind = LegKind.DECODE) -> list[str]:
        return [str(node.card.node_id) for node in self.table.open_nodes(role)]

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self.changed:
            await self.changed.wait_for(is_so)

    async def until_open(self, *names: str, role: LegKind = LegKind.DECODE) -> None:
        await self.until(lambda: sorted(self.open_names(role)) == sorted(names))


@asynccontextmanager
async def a_view(tls: TlsConfig = PLAIN, **named: str) -> AsyncIterator[View]:
    view = View(node_calls=GrpcNodeCalls(tls))
    for source in (DECODES, PREFILLS):
        if source.host in named:
            view.named[source] = frozenset({named[source.host]})
    roles: dict[NodeSource, LegKind] = {PREFILLS: LegKind.PREFILL, DECODES: LegKind.DECODE}
    discovery = NodeDiscovery(roles, 0.01, view.find)
    async with (
        view.node_calls,
        watching(discovery, view.table, view.node_calls, view.note_change),
    ):
        yield view


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), PATIENCE_S)

    asyncio.run(bounded())


def test_nodes_join_when_resolved_and_leave_when_no_longer_resolved() -> None:
    async def scenario() -> None:
        async with a_node_server(name="d1") as one, a_view() as view:
            async with a_node_server(name="d2") as two:
                view.named[DECODES] = frozenset({one.address})
                await view.until_open("d1")
                view.named[DECODES] = frozenset({one.address, two.address})
                await view.until_open("d1", "d2")

                view.named[DECODES] = frozenset({one.address})
                await view.until_open("d1")
                # It may still have requests, so it is watched until it ends.
                assert {node.address for node in view.table.nodes} == {one.address, two.address}

                view.named[DECODES] = frozenset({one.address, two.address})
                await view.until_open("d1", "d2")
                view.named[DECODES] = frozenset({one.address})
                await view.until_open("d1")
            await view.until(lambda: view.node_calls.addresses == {one.address})

    run(scenario)


def test_a_node_restarted_at_the_same_address_is_a_new_node() -> None:
    async def scenario() -> None:
        async with a_view() as view:
            async with a_node_server(name="d1") as node:
                view.named[DECODES] = frozenset({node.address})
                await view.until_open("d1")
            await view.until_open()
            port = int(node.address.rpartition(":")[2])

            async with a_node_server(name="d1", port=port, incarnation="2"):
                await view.until_open("d1")
                assert [known.card.incarnation for known in view.table.nodes] == ["2"]

    run(scenario)


def test_a_name_that_moves_to_another_address_is_followed() -> None:
    async def scenario() -> None:
        async with a_node_server(name="d1") as old, a_view(decode=old.address) as view:
            await view.until_open("d1")

            async with a_node_server(name="d1", incarnation="2") as new:
                view.named[DECODES] = frozenset({new.address})
                await view.until(
                    lambda: (
                        [n.address for n in view.table.open_nodes(LegKind.DECODE)] == [new.address]
                    )
                )

    run(scenario)


def test_a_failing_resolver_removes_no_node() -> None:
    async def scenario() -> None:
        async with a_node_server(name="d1") as node, a_view(decode=node.address) as view:
            await view.until_open("d1")
            del view.named[DECODES]  # from now on it fails
            node.state.request_drain()
            await view.until_open()  # and updates of the node still arrive

            assert [known.address for known in view.table.nodes] == [node.address]

    run(scenario)


def test_an_unhealthy_node_gets_no_requests_until_it_recovers() -> None:
    async def scenario() -> None:
        async with a_node_server(name="d1") as node, a_view(decode=node.address) as view:
            await view.until_open("d1")

            await node.health.set_ready(False)
            await view.until_open()
            await node.health.set_ready(True)

            await view.until_open("d1")

    run(scenario)


def test_a_node_that_was_never_healthy_is_not_in_the_table() -> None:
    """A known but unready node would count as existing for its role: prompts would not wait."""

    async def scenario() -> None:
        async with a_node_server(name="d1") as ill, a_node_server(name="d2") as well:
            await ill.health.set_ready(False)
            async with a_view() as view:
                view.named[DECODES] = frozenset({ill.address, well.address})
                await view.until_open("d2")
                await well.health.set_ready(False)
                await view.until_open()
                assert [node.address for node in view.table.nodes] == [well.address]

                await ill.health.set_ready(True)
                await view.until_open("d1")

    run(scenario)


def test_a_node_listed_for_another_leg_than_it_offers_is_used_for_what_it_offers() -> None:
    async def scenario() -> None:
        async with (
            a_node_server(LegKind.PREFILL, "p1") as node,
            a_view(prefill=node.address, decode=node.address) as view,
        ):
            await view.until_open("p1", role=LegKind.PREFILL)
            async with a_node_server(name="d1") as decode:
                view.named[DECODES] = frozenset({node.address, decode.address})
                await view.until_open("d1")
                view.named[DECODES] = frozenset({decode.address})
                await view.until(lambda: len(view.table.watched) == 2)

                assert view.open_names(LegKind.PREFILL) == ["p1"]
                assert view.open_names(LegKind.DECODE) == ["d1"]

    run(scenario)


def test_joining_nodes_are_connected_in_either_order() -> None:
    async def scenario() -> None:
        async with (
            a_node_server(LegKind.PREFILL, "p1") as first,
            a_node_server(LegKind.PREFILL, "p2") as last,
            a_node_server(name="d1") as decode,
            a_view(prefill=first.address) as view,
        ):
            await view.until_open("p1", role=LegKind.PREFILL)
            view.named[DECODES] = frozenset({decode.address})
            assert await decode.connected.get() == first.address
            view.named[PREFILLS] = frozenset({first.address, last.address})
            assert await decode.connected.get() == last.address

    run(scenario)


class ErrorRecorder(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.words: asyncio.Queue[str] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.words.put_nowait(record.getMessage())


def test_a_node_unreachable_over_tls_is_logged(tmp_path: Path) -> None:
    strict = TlsConfig(ca=make_authority(tmp_path).ca)

    async def scenario() -> None:
        received = ErrorRecorder()
        logging.getLogger("baton.router.discovery.watcher").addHandler(received)
        try:
            async with a_node_server(name="d1") as node, a_view(strict, decode=node.address):
                reported = await received.words.get()
        finally:
            logging.getLogger("baton.router.discovery.watcher").removeHandler(received)
        assert reported.startswith(f"decode node: {node.address} does not speak TLS")

    run(scenario)
