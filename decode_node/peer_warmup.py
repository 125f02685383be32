"""Opens links to prefill nodes ahead of their first hand-off, a few at a time.

Opening a data path takes memory and tens of milliseconds of the engine's thread. So the address
must first say that it offers prefill legs, and at most one data path is opened between two steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from grpc import RpcError

from baton.core.errors import InvalidRequest
from baton.core.legs import LegKind, Legs, role_of
from baton.kv_transfer.errors import PeerUnreachable
from baton.rpc.channel import open_channel
from baton.rpc.errors import TooManyConnects
from baton.rpc.node_info import GET_NODE, card_from
from baton.rpc.security.tls import TlsConfig
from baton.rpc.status import remote_error
from baton.v1 import node_pb2_grpc

MAX_IN_FLIGHT = 32  # twice as many as one router requests of a node
TIMEOUT_S = 4.0


class PeerWarmup:
    def __init__(
        self,
        read_legs: Callable[[str], Awaitable[Legs]],
        link_up: Callable[[str], Awaitable[None]],
        *,
        max_in_flight: int = MAX_IN_FLIGHT,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._read_legs = read_legs
        self._link_up = link_up
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._in_flight: set[str] = set()  # addresses
        self._engine_turn = asyncio.Lock()

    async def connect(self, address: str) -> None:
        """Start to open a link. Raises TooManyConnects, PeerUnreachable and InvalidRequest."""
        if address in self._in_flight:
            return
        if len(self._in_flight) >= self._max_in_flight:
            raise TooManyConnects(
                f"{self._max_in_flight} links are being opened; try again in a second, or let the "
                "first hand-off open it"
            )
        self._in_flight.add(address)
        try:
            async with asyncio.timeout(self._timeout_s):
                legs = await self._read_legs(address)
                if LegKind.PREFILL not in legs:
                    raise PeerUnreachable(
                        f"{address} is a {role_of(legs)} node; name a prefill node"
                    )
                async with self._engine_turn:
                    await self._link_up(address)
        except TimeoutError:
            raise PeerUnreachable(
                f"no link to {address} within {self._timeout_s:g} s; check that a prefill node "
                "listens there"
            ) from None
        finally:
            self._in_flight.discard(address)


async def read_legs(tls: TlsConfig, address: str) -> Legs:
    """Return what the node at host:port offers. Raises PeerUnreachable and InvalidRequest."""
    host, _, port = address.rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        raise InvalidRequest(
            f"{address!r} is not an address; name a prefill node as host:port", "address"
        )
    async with open_channel(address, tls) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        try:
            return card_from(await stub.GetNode(GET_NODE)).legs
        except RpcError as error:
            raise PeerUnreachable(
                f"no prefill node answers at {address}: {remote_error(error).message}"
            ) from error
