"""gRPC keepalive: silent connections are detected, and servers accept the pings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import KEEPALIVE, Keepalive, ServerConnections, open_channel
from baton.rpc.server import serving

PATIENCE_S = 30
OFTEN = Keepalive(every_s=0.1, patience_s=PATIENCE_S)
WATCHFUL = Keepalive(every_s=0.1, patience_s=1.0)


@dataclass(slots=True)
class Wire:
    """TCP proxy between client and server that can stop forwarding."""

    is_silent: bool = False
    address: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _sinks: list[asyncio.StreamWriter] = field(default_factory=list)

    async def join(
        self, server: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        host, port = server.split(":")
        there, back = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, back), (there, writer)):
            self._sinks.append(sink)
            self._tasks.add(asyncio.ensure_future(self._pass_on(source, sink)))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self.is_silent:
                sink.write(data)
        if not self.is_silent:
            sink.close()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for sink in self._sinks:
            sink.close()


@asynccontextmanager
async def a_wire_to(server: str) -> AsyncIterator[Wire]:
    wire = Wire()
    listener = await asyncio.start_server(
        lambda reader, writer: wire.join(server, reader, writer), "127.0.0.1", 0
    )
    async with listener:
        host, port = listener.sockets[0].getsockname()
        wire.address = f"{host}:{port}"
        yield wire
        wire.close()


class Watching:
    """Call that receives one response and then waits."""

    def __init__(self, address: str, keepalive: Keepalive) -> None:
        self._channel = open_channel(address, keepalive=keepalive)
        self._call = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest()
        )

    async def begin(self) -> None:
        await self._call.read()

    async def failure(self) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as failure:
            await self._call.read()
        return failure.value

    @property
    def is_over(self) -> bool:
        return bool(self._call.done())

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def test_a_silent_peer_is_detected() -> None:
    async def scenario() -> None:
        async with (
            serving("127.0.0.1", 0, (), keepalive=WATCHFUL) as server,
            a_wire_to(server.address) as wire,
        ):
            watching = Watching(wire.address, WATCHFUL)
            await watching.begin()

            wire.is_silent = True

            failure = await watching.failure()
            await watching.close()
        assert failure.code() is grpc.StatusCode.UNAVAILABLE
        assert "timeout" in (failure.details() or "")

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_pings_at_the_agreed_rate_are_accepted_and_faster_ones_refused() -> None:
    async def scenario() -> None:
        async with (
            serving("127.0.0.1", 0, (), keepalive=OFTEN) as calm,
            serving("127.0.0.1", 0, (), keepalive=KEEPALIVE) as strict,
        ):
            agreed, too_often = Watching(calm.address, OFTEN), Watching(strict.address, OFTEN)
            await agreed.begin()
            await too_often.begin()

            failure = await too_often.failure()

            assert "too many pings" in (failure.details() or "").lower()
            assert not agreed.is_over
            await agreed.close()
            await too_often.close()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_connections_without_http2_release_their_slots() -> None:
    limits = ServerConnections(max_connections=2, handshake_s=0.2)

    async def run() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            serving("127.0.0.1", 0, (), connections=limits) as server,
        ):
            host, _, port = server.address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            async with open_channel(server.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.Check(health_pb2.HealthCheckRequest())
                for reading, _ in silent:
                    await reading.read()  # to its end

                await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            for _, writing in silent:
                writing.close()

    asyncio.run(run())
