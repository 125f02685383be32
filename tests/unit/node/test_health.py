"""Readiness and liveness as reported to health watchers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.core.ids import RequestId
from baton.engine.engine_thread import EngineThread
from baton.engine.plan import Plan, RunResult
from baton.node.run import DEAD_FACTOR, follow_heartbeat
from baton.rpc.channel import open_channel
from baton.rpc.health import LIVENESS, Health
from baton.rpc.server import serving
from tests.support.engines import an_engine, an_engine_request
from tests.support.fake_runner import SynchronousRunner

PATIENCE_S = 30
STUCK_AFTER_S = 60.0


def test_every_watcher_receives_every_change_after_another_has_disconnected() -> None:
    async def scenario() -> None:
        health = Health(("a.Service",))
        stays, leaves = health.changes(), health.changes()
        assert [await anext(stays), await anext(leaves)] == [False, False]
        await leaves.aclose()

        await health.set_ready(True)
        assert await anext(stays) is True
        await health.set_ready(False)
        assert await anext(stays) is False

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


class LayeredRunner(SynchronousRunner):
    """Runner whose passes advance layer by layer as the test allows."""

    def __init__(self) -> None:
        self.layers: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether there is another
        self.is_inside = threading.Event()
        self.on_layer: Callable[[], None] = lambda: None

    def run(self, plan: Plan) -> RunResult:
        self.is_inside.set()
        while self.layers.get():
            self.on_layer()
        return RunResult()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_engine_in_a_long_step_is_ready_while_it_progresses() -> None:
    runner, clock, health = LayeredRunner(), Clock(), Health(())

    async def scenario() -> None:
        changes = health.changes()
        following = asyncio.ensure_future(follow_heartbeat(engine, health, STUCK_AFTER_S))
        assert [await anext(changes), await anext(changes)] == [False, True]

        clock.now_s += STUCK_AFTER_S + 1
        assert await anext(changes) is False
        runner.layers.put(True)  # it moves on, in the same step
        assert await anext(changes) is True

        following.cancel()

    with EngineThread(an_engine(runner=runner), clock=clock) as engine:
        runner.on_layer = engine.beat
        engine.submit(an_engine_request())
        assert runner.is_inside.wait(PATIENCE_S)
        try:
            asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
        finally:
            engine.abort(RequestId("a"))
            runner.layers.put(False)


@dataclass(slots=True)
class Heart:
    failure: BaseException | None = None
    silence_s: float = 0.0

    def seconds_since_heartbeat(self) -> float:
        return self.silence_s


def test_the_end_of_the_engine_is_reported_and_no_service_is_ready() -> None:
    async def scenario() -> None:
        health, heart = Health(()), Heart()
        await health.set_ready(True)
        heart.failure = ZeroDivisionError("a bug")

        assert await follow_heartbeat(heart, health, STUCK_AFTER_S) is heart.failure
        assert not health.is_ready

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


@pytest.mark.parametrize(("factor", "is_alive"), [(1, True), (DEAD_FACTOR, False)])
def test_an_engine_stuck_beyond_the_timeout_is_dead(factor: int, is_alive: bool) -> None:
    async def scenario() -> None:
        health = Health(())
        await health.set_ready(True)
        changes = health.changes()
        assert await anext(changes) is True
        heart = Heart(silence_s=factor * STUCK_AFTER_S + 1)
        following = asyncio.ensure_future(follow_heartbeat(heart, health, STUCK_AFTER_S))

        assert await anext(changes) is False
        assert health.is_alive is is_alive

        following.cancel()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_server_that_is_not_ready_is_still_alive() -> None:
    async def scenario() -> tuple[int, int]:
        async with serving("127.0.0.1", 0, ()) as server, open_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            ready = await stub.Check(health_pb2.HealthCheckRequest())
            alive = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS))
            return ready.status, alive.status

    statuses = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))

    kinds = health_pb2.HealthCheckResponse
    assert statuses == (kinds.NOT_SERVING, kinds.SERVING)
