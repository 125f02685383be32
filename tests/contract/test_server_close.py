"""End of a gRPC server under load: the status of the last calls, and what is logged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.rpc.channel import open_channel
from baton.rpc.server import serving

PATIENCE_S = 30
NUM_CALLERS = 16


async def call_until_it_fails(address: str, began: asyncio.Event) -> grpc.StatusCode:
    """Call as fast as possible, each call by its own connection's client."""
    async with open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            while True:
                await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
                began.set()
        except grpc.aio.AioRpcError as error:
            return error.code()


async def watch(address: str, began: asyncio.Event) -> grpc.StatusCode:
    async with open_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            async for _ in health_pb2_grpc.HealthStub(channel).Watch(request, timeout=PATIENCE_S):
                began.set()
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError("a watch has no end of its own")


async def close_under_load(call: Any) -> list[grpc.StatusCode]:
    began = [asyncio.Event() for _ in range(NUM_CALLERS)]
    async with serving("127.0.0.1", 0, ()) as server:
        calls = [asyncio.ensure_future(call(server.address, event)) for event in began]
        await asyncio.gather(*(event.wait() for event in began))
    codes: list[grpc.StatusCode] = await asyncio.gather(*calls)
    return codes


class SlowToEnd(grpc.aio.ServerInterceptor):
    """Lets no call reach its method; a cancelled call ends many turns of the event loop later."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.has_ended = False

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        self.arrived.set()
        try:
            return await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            self.has_ended = True


def test_a_closed_server_has_no_call_that_the_end_of_the_loop_would_cancel(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        slow, began = SlowToEnd(), asyncio.Event()
        async with serving("127.0.0.1", 0, (), interceptors=(slow,)) as server:
            call = asyncio.ensure_future(call_until_it_fails(server.address, began))
            await slow.arrived.wait()
        assert slow.has_ended
        assert await call is grpc.StatusCode.UNAVAILABLE

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))

    assert [one for one in caplog.records if one.levelno > logging.INFO] == []
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("call", [call_until_it_fails, watch])
def test_calls_that_a_closing_server_does_not_answer_end_as_unavailable(
    call: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = asyncio.run(asyncio.wait_for(close_under_load(call), PATIENCE_S))

    assert codes == [grpc.StatusCode.UNAVAILABLE] * NUM_CALLERS
    assert [one for one in caplog.records if one.levelno > logging.INFO] == []
    assert "Traceback" not in capfd.readouterr().err
