"""Peer warmup: links to reachable prefill nodes, a bounded number at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from baton.core.errors import InvalidRequest
from baton.core.legs import LegKind, Legs
from baton.decode_node.peer_warmup import PeerWarmup, read_legs
from baton.kv_transfer.errors import PeerUnreachable
from baton.rpc.errors import TooManyConnects
from baton.rpc.security.tls import PLAIN
from baton.rpc.server import serving

PATIENCE_S = 30.0


class Nodes:
    """Fake nodes: prefill at addresses with p, decode at those with d; others never answer."""

    def __init__(self) -> None:
        self.linked: list[str] = []
        self.requested: list[str] = []
        self.num_linking = 0
        self.most_linking = 0

    async def legs_of(self, address: str) -> Legs:
        self.requested.append(address)
        if address.startswith("p"):
            return (LegKind.PREFILL,)
        if address.startswith("d"):
            return (LegKind.DECODE,)
        await asyncio.Event().wait()
        raise AssertionError

    async def link_up(self, address: str) -> None:
        self.num_linking += 1
        self.most_linking = max(self.most_linking, self.num_linking)
        await asyncio.sleep(0)
        self.num_linking -= 1
        self.linked.append(address)


def run(scenario: Callable[[Nodes], Awaitable[None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await scenario(Nodes())

    asyncio.run(timed())


def test_links_are_established_one_at_a_time() -> None:
    async def scenario(nodes: Nodes) -> None:
        warmup = PeerWarmup(nodes.legs_of, nodes.link_up)
        await asyncio.gather(*(warmup.connect(f"p{number}") for number in range(20)))

        assert len(nodes.linked) == 20
        assert nodes.most_linking == 1

    run(scenario)


def test_unresponsive_addresses_time_out_and_do_not_use_up_links() -> None:
    async def scenario(nodes: Nodes) -> None:
        warmup = PeerWarmup(nodes.legs_of, nodes.link_up, timeout_s=0.01)
        with pytest.raises(PeerUnreachable, match="no link to x within"):
            await warmup.connect("x")

        await warmup.connect("p0")

        assert nodes.linked == ["p0"]

    run(scenario)


def test_warm_ups_beyond_the_limit_are_refused_by_name() -> None:
    async def scenario(nodes: Nodes) -> None:
        warmup = PeerWarmup(nodes.legs_of, nodes.link_up, max_in_flight=2)
        waiting = [asyncio.ensure_future(warmup.connect(name)) for name in ("x0", "x1", "x1")]
        await waiting[2]  # that one is being made
        with pytest.raises(TooManyConnects):
            await warmup.connect("p0")

        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        await warmup.connect("p0")

        assert nodes.linked == ["p0"]

    run(scenario)


def test_a_decode_node_does_not_connect_to_a_decode_node() -> None:
    async def scenario(nodes: Nodes) -> None:
        with pytest.raises(PeerUnreachable, match="decode node"):
            await PeerWarmup(nodes.legs_of, nodes.link_up).connect("d0")

        assert nodes.linked == []

    run(scenario)


def test_a_server_that_is_not_a_node_is_detected_over_grpc() -> None:
    async def scenario(nodes: Nodes) -> None:
        async with serving("127.0.0.1", 0, ()) as server:
            with pytest.raises(PeerUnreachable, match="no prefill node answers"):
                await read_legs(PLAIN, server.address)

    run(scenario)


@pytest.mark.parametrize(
    "address", ["", "prefill-0", ":50051", "prefill-0:port", "prefill-0:\u0665"]
)
def test_an_address_without_host_or_port_is_refused_before_it_is_dialled(address: str) -> None:
    async def scenario(_nodes: Nodes) -> None:
        with pytest.raises(InvalidRequest, match="host:port"):
            await read_legs(PLAIN, address)

    run(scenario)
