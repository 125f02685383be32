"""Parsing of router addresses, and errors of failed connections."""

from __future__ import annotations

import asyncio

import pytest
from grpc import StatusCode

from baton.cli.health_check import ask
from baton.client import AsyncClient, BatonError, Client
from baton.core.errors import InvalidConfig
from baton.rpc.router_address import router_target, unreachable
from baton.rpc.security.tls import PLAIN
from baton.rpc.server import serving


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("localhost", "localhost:50051"),
        (" router.example:7 ", "router.example:7"),
        ("127.0.0.1", "127.0.0.1:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:8", "[::1]:8"),
        ("dns:///router", "dns:///router:50051"),
        ("dns://8.8.8.8/router:9", "dns://8.8.8.8/router:9"),
        ("unix:///run/router", "unix:///run/router"),
    ],
)
def test_an_omitted_port_is_the_router_port_and_not_443(written: str, target: str) -> None:
    assert router_target(written) == target


@pytest.mark.parametrize(
    ("written", "word"),
    [
        ("http://127.0.0.1:8000", "is a URL"),
        ("https://router.example/v1", "is a URL"),
        ("", "is empty"),
        (":50051", "no host"),
        ("a b:1", "no host"),
        ("127.0.0.1:99999", "from 1 to 65535"),
        ("router:http", "from 1 to 65535"),
        ("router:", "from 1 to 65535"),
    ],
)
def test_an_invalid_address_is_refused_before_dialling(written: str, word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        Client(written)
    with pytest.raises(InvalidConfig, match=word):
        ask(written, 1.0, PLAIN)


def test_a_failed_connection_is_reported_without_grpc_internals() -> None:
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7: Failed to "
        "connect to remote host: connect: Connection refused (111)"
    )

    reported = unreachable("127.0.0.1:7", details)

    assert reported.startswith("127.0.0.1:7 cannot be reached: connection refused; is a router")
    assert unreachable("a:1", "of a new kind").startswith("a:1 cannot be reached: of a new kind")


def test_a_server_that_is_not_a_router_is_an_error_with_advice() -> None:
    async def scenario() -> BatonError:
        async with serving("127.0.0.1", 0, ()) as server, AsyncClient(server.address) as client:
            with pytest.raises(BatonError) as refusal:
                await client.model()
        return refusal.value

    refusal = asyncio.run(scenario())

    assert refusal.code is StatusCode.UNIMPLEMENTED
    assert "if it is a node, give the router's address" in refusal.message
