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
class Heard:
    """Messages delivered to one worker, in order; the loss of a link is recorded as its reason."""

    letters: asyncio.Queue[tuple[LinkId, LinkMessage | str]] = field(default_factory=asyncio.Queue)
    pulsed: asyncio.Event = field(default_factory=asyncio.Event)

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self.letters.put_nowait((link_id, message))

    def lost(self, link_id: LinkId, reason: str) -> None:
        self.letters.put_nowait((link_id, reason))

    def pulse(self) -> None:
        self.pulsed.set()

    async def next(self) -> tuple[LinkId, LinkMessage | str]:
        return await asyncio.wait_for(self.letters.get(), PATIENCE_S)


@dataclass(frozen=True, slots=True)
class Side:
    links: GrpcLinks
    heard: Heard


@asynccontextmanager
async def a_side(tls: TlsConfig = PLAIN) -> AsyncIterator[Side]:
    links, heard = GrpcLinks(tls), Heard()
    links.attach(heard, lambda: None)
    async with links:
        yield Side(links, heard)


@asynccontextmanager
async def a_listening_side(
    port: int = 0, tls: TlsConfig = PLAIN
) -> AsyncIterator[tuple[Side, str]]:
    links, heard = GrpcLinks(), Heard()
    links.attach(heard, lambda: None)
    servicer = KvLinkServicer(links)
    service = Service(
        SERVICE,
        lambda server: kv_link_pb2_grpc.add_KvLinkServiceServicer_to_server(servicer, server),
    )
    async with serving("127.0.0.1", port, [service], tls=tls) as server, links:
        yield Side(links, heard), server.address


def in_time(scene: Callable[[], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scene()

    asyncio.run(play())


def test_messages_sent_before_the_stream_is_open_arrive_first_and_in_order() -> None:
    async def scene() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            for number in range(50):
                d.links.send(link_id, a_message(number))

            heard = [await p.heard.next() for _ in range(50)]

            assert [message for _, message in heard] == [a_message(n) for n in range(50)]
            assert len({link for link, _ in heard}) == 1

    in_time(scene)


def test_the_worker_is_woken_periodically_without_messages() -> None:
    async def scene() -> None:
        async with a_side() as alone:
            await alone.heard.pulsed.wait()

    in_time(scene)


def test_the_accepting_side_replies_on_the_same_link() -> None:
    async def scene() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            dialled = [d.links.dial(address) for _ in range(2)]
            for number, link_id in enumerate(dialled):
                d.links.send(link_id, a_message(number))

            for _ in dialled:
                accepted, message = await p.heard.next()
                assert not isinstance(message, str)
                p.links.send(accepted, message)

            answers = dict([await d.heard.next() for _ in dialled])
            assert answers == {dialled[0]: a_message(0), dialled[1]: a_message(1)}

    in_time(scene)


def test_a_closed_link_delivers_sent_messages_and_is_lost_only_for_the_peer() -> None:
    async def scene() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            d.links.send(link_id, Closed("bye"))
            d.links.close(link_id)
            d.links.send(link_id, a_message(1))

            _, last_word = await p.heard.next()
            _, loss = await p.heard.next()

            assert last_word == Closed("bye")
            assert isinstance(loss, str)
        assert d.heard.letters.empty()

    in_time(scene)


def test_the_accepting_side_can_close_the_link() -> None:
    async def scene() -> None:
        async with a_listening_side() as (p, address), a_side() as d:
            link_id = d.links.dial(address)
            d.links.send(link_id, a_message(1))
            accepted, _ = await p.heard.next()

            p.links.send(accepted, Closed("no"))
            p.links.close(accepted)

            assert await d.heard.next() == (link_id, Closed("no"))
            lost, reason = await d.heard.next()
            assert (lost, isinstance(reason, str)) == (link_id, True)
        assert p.heard.letters.empty()

    in_time(scene)


def test_dialling_an_address_without_a_server_loses_the_link() -> None:
    async def scene() -> None:
        async with a_listening_side() as (_, address):
            pass  # the port is free again
        async with a_side() as d:
            link_id = d.links.dial(address)

            lost, reason = await d.heard.next()

            assert (lost, isinstance(reason, str)) == (link_id, True)

    in_time(scene)


def test_dialling_without_the_required_certificate_loses_the_link_with_the_reason(
    tmp_path: Path,
) -> None:
    authority = make_authority(tmp_path)
    both = authority.mutual("node", "127.0.0.1")

    async def scene() -> None:
        async with a_listening_side(tls=both) as (p, address):
            async with a_side(TlsConfig(ca=authority.ca)) as d:
                link_id = d.links.dial(address)

                lost, reason = await d.heard.next()

                assert lost == link_id
                assert "wants a client certificate" in str(reason)
            async with a_side(both) as d:
                link_id = d.links.dial(address)
                d.links.send(link_id, a_message(1))
                _, heard = await p.heard.next()
                assert heard == a_message(1)

    in_time(scene)


def test_a_closed_side_is_reported_lost_to_its_peer_once() -> None:
    async def scene() -> None:
        async with a_side() as d:
            async with a_listening_side() as (p, address):
                link_id = d.links.dial(address)
                d.links.send(link_id, a_message(1))
                await p.heard.next()

            lost, reason = await d.heard.next()
            assert (lost, isinstance(reason, str)) == (link_id, True)
        assert d.heard.letters.empty()

    in_time(scene)
