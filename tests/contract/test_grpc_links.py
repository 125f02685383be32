"""Control links of KV workers over real gRPC on loopback: order, loss and heartbeat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.core.ids import HandoffId
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.messages import Closed, LinkMessage, Revoked
from baton.node.kv.link import GrpcLinks
from baton.node.servicer import KvLinkServicer
from baton.rpc.security.tls import PLAIN, TlsConfig
from baton.rpc.server import Service, serving
from baton.v1 import kv_link_pb2_grpc
from tests.support.certificates import make_authority

PATIENCE_S = 30
SERVICE = "baton.v1.KvLinkService"


def a_message(number: int) -> LinkMessage:
    return Revoked(HandoffId("r", number))


@dataclass(slots=True)
class ReceivedMessages:
    """Messages delivered to one worker, in order; the loss of a link is recorded as its reason."""

    queue: asyncio.Queue[tuple[LinkId, LinkMessage | str]] = field(default_factory=asyncio.Queue)
    pulsed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self.queue.put_nowait((link_id, message))

    def lost(self, link_id: LinkId, reason: str) -> None:
        self.queue.put_nowait((link_id, reason))

    def pulse(self) -> None:
        self.pulsed.set()

    async def next(self) -> tuple[LinkId, LinkMessage | str]:
        return await asyncio.wait_for(self.queue.get(), PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Side:
    links: GrpcLinks
    received: ReceivedMessages


@asynccontextmanager
async def a_side(tls: TlsConfig = PLAIN) -> AsyncIterator[Side]:
    links, received = GrpcLinks(tls), ReceivedMessages()
    links.attach(received, lambda: None)
    async with links:
        yield Side(links, received)


@asynccontextmanager
async def a_listening_side(
    port: int = 0, tls: TlsConfig = PLAIN
) -> AsyncIterator[tuple[Side, str]]:
    links, received = GrpcLinks(), ReceivedMessages()
    links.attach(received, lambda: None)
    servicer = KvLinkServicer(links)
    service = Service(
        SERVICE,
        lambda server: kv_link_pb2_grpc.add_KvLinkServiceServicer_to_server(servicer, server),
    )
    async with serving("127.0.0.1", port, [service], tls=tls) as server, links:
        yield Side(links, received), server.address


def in_time(scenario: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario()

    asyncio.run(play())


def test_messages_sent_before_the_stream_is_open_arrive_first_and_in_order() -> None:
    async def scenario() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            for number in range(50):
                d.links.send(link_id, a_message(number))

            received = [await p.received.next() for _ in range(50)]

            assert [message for _, message in received] == [a_message(n) for n in range(50)]
            assert len({link for link, _ in received}) == 1

    in_time(scenario)


def test_the_worker_is_woken_periodically_without_messages() -> None:
    async def scenario() -> None:
        async with a_side() as alone:
            await alone.received.pulsed.wait()

    in_time(scenario)


def test_the_accepting_side_replies_on_the_same_link() -> None:
    async def scenario() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            dialled = [d.links.dial(address) for _ in range(2)]
            for number, link_id in enumerate(dialled):
                d.links.send(link_id, a_message(number))

            for _ in dialled:
                accepted, message = await p.received.next()
                assert not isinstance(message, str)
                p.links.send(accepted, message)

            answers = dict([await d.received.next() for _ in dialled])
            assert answers == {dialled[0]: a_message(0), dialled[1]: a_message(1)}

    in_time(scenario)


def test_a_closed_link_delivers_sent_messages_and_is_lost_only_for_the_peer() -> None:
    async def scenario() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            d.links.send(link_id, Closed("bye"))
            d.links.close(link_id)
            d.links.send(link_id, a_message(1))

            _, last_word = await p.received.next()
            _, loss = await p.received.next()

            assert last_word == Closed("bye")
            assert isinstance(loss, str)
        assert d.received.queue.empty()

    in_time(scenario)


def test_the_accepting_side_can_close_the_link() -> None:
    async def scenario() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            d.links.send(link_id, a_message(1))
            accepted, _ = await p.received.next()

            p.links.send(accepted, Closed("no"))
            p.links.close(accepted)

            assert await d.received.next() == (link_id, Closed("no"))
            lost, reason = await d.received.next()
            assert (lost, isinstance(reason, str)) == (link_id, True)
        assert p.received.queue.empty()

    in_time(scenario)


def test_dialling_an_address_without_a_server_loses_the_link() -> None:
    async def scenario() -> None:
        async with a_listening_side() as (_, address):
            pass  # the port is free again
        async with a_side() as d:
            link_id = d.links.dial(address)

            lost, reason = await d.received.next()

            assert (lost, isinstance(reason, str)) == (link_id, True)

    in_time(scenario)


def test_dialling_without_the_required_certificate_loses_the_link_with_the_reason(
    tmp_path: Path,
) -> None:
    authority = make_authority(tmp_path)
    both = authority.mutual("node", "127.0.0.1")

    async def scenario() -> None:
        async with a_listening_side(tls=both) as (p, address):
            async with a_side(TlsConfig(ca=authority.ca)) as d:
                link_id = d.links.dial(address)

                lost, reason = await d.received.next()

                assert lost == link_id
                assert "if it wants a client certificate, give --tls-cert" in str(reason)
            async with a_side(both) as d:
                link_id = d.links.dial(address)
                d.links.send(link_id, a_message(1))
                _, received = await p.received.next()
                assert received == a_message(1)

    in_time(scenario)


def test_a_closed_side_is_reported_lost_to_its_peer_once() -> None:
    async def scenario() -> None:
        async with a_side() as d:
            async with a_listening_side() as (p, address):
                link_id = d.links.dial(address)
                d.links.send(link_id, a_message(1))
                await p.received.next()

            lost, reason = await d.received.next()
            assert (lost, isinstance(reason, str)) == (link_id, True)
        assert d.received.queue.empty()

    in_time(scenario)
