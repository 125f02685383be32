"""Outputs of the engine thread as asyncio streams."""

from __future__ import annotations

import asyncio
import queue
import threading
from contextlib import aclosing
from dataclasses import replace

import pytest
from grpc import StatusCode

from baton.core.errors import InvalidRequest
from baton.core.ids import HandoffId, NodeId, Peer, RequestId
from baton.core.output import FinishReason, Output
from baton.core.request import EngineRequest, ReceiveKv
from baton.engine.engine_thread import EngineThread
from baton.engine.errors import EngineStopped
from baton.engine.plan import Plan, RunResult
from baton.engine.scheduler.config import LoadFailurePolicy
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.types import KvOrders, KvReports, Lost
from baton.node.engine_calls import EngineCalls, NodeChanges
from baton.node.operator_orders import reset_prefix_cache
from baton.rpc.errors import KvLoadFailed, RequestIdInUse
from baton.rpc.status import status_of
from tests.support.engines import an_engine, an_engine_request
from tests.support.fake_runner import SynchronousRunner
from tests.support.scheduler_state import is_idle

PATIENCE_S = 30
LONG = 100


def engine_request(
    name: str, *, prompt: tuple[int, ...] = (1, 2), max_tokens: int = 3
) -> EngineRequest:
    return an_engine_request(name, prompt=prompt, max_tokens=max_tokens)


async def collect(calls: EngineCalls, request: EngineRequest) -> list[Output]:
    return [output async for output in calls.stream_outputs(request)]


async def serve_and_wait(*requests: EngineRequest) -> list[list[Output]]:
    with EngineThread(an_engine()) as engine, EngineCalls(engine, NodeChanges()) as calls:
        answers = await asyncio.gather(*(collect(calls, request) for request in requests))
        return list(answers)


def test_each_stream_gets_its_own_outputs_until_the_end() -> None:
    first, second = asyncio.run(
        asyncio.wait_for(
            serve_and_wait(engine_request("a"), engine_request("b", prompt=(9,))), PATIENCE_S
        )
    )

    assert {output.request_id for output in first} == {"a"}
    assert {output.request_id for output in second} == {"b"}
    assert [output.first_index for output in first] == [0, 1, 2]
    assert first[-1].finish_reason is not None


def test_closing_a_stream_aborts_its_request_and_frees_its_blocks() -> None:
    core = an_engine()

    alive: queue.SimpleQueue[tuple[RequestId, ...]] = queue.SimpleQueue()

    async def leave() -> None:
        with EngineThread(core) as engine, EngineCalls(engine, NodeChanges()) as calls:
            async with aclosing(
                calls.stream_outputs(engine_request("a", max_tokens=LONG))
            ) as outputs:
                await anext(outputs)
            engine.post(lambda: alive.put(core.scheduler.request_ids()))

    asyncio.run(asyncio.wait_for(leave(), PATIENCE_S))

    assert alive.get(timeout=PATIENCE_S) == ()
    assert is_idle(core.scheduler)
    core.scheduler.check()


def test_an_id_in_use_is_refused_and_the_running_request_continues() -> None:
    async def twice() -> list[Output]:
        with EngineThread(an_engine()) as engine, EngineCalls(engine, NodeChanges()) as calls:
            async with aclosing(
                calls.stream_outputs(engine_request("a", max_tokens=LONG))
            ) as outputs:
                first = await anext(outputs)
                with pytest.raises(RequestIdInUse):
                    await collect(calls, engine_request("a"))
                return [first, *[output async for output in outputs]]

    outputs = asyncio.run(asyncio.wait_for(twice(), PATIENCE_S))

    assert sum(len(output.token_ids) for output in outputs) == LONG


def test_an_id_that_is_registered_again_gets_nothing_of_its_closed_stream() -> None:
    async def close_and_register_again() -> list[Output]:
        with EngineThread(an_engine()) as engine, EngineCalls(engine, NodeChanges()) as calls:
            closed = calls.stream_outputs(engine_request("a", max_tokens=LONG))
            await anext(closed)
            await closed.aclose()  # its abort, and perhaps a token, are still to be dispatched
            return await collect(calls, engine_request("a", prompt=(9, 8, 7)))

    outputs = asyncio.run(asyncio.wait_for(close_and_register_again(), PATIENCE_S))

    assert [output.first_index for output in outputs] == [0, 1, 2]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


class LosesAll(KvDriver):
    """KV worker that loses every receive."""

    def __init__(self) -> None:
        self._lost: list[HandoffId] = []

    def start(self, orders: KvOrders, now: float) -> None:
        self._lost += [order.handoff_id for order in orders.receives]

    def poll(self, now: float) -> KvReports:
        lost, self._lost = tuple(self._lost), []
        failed = tuple(Lost(handoff_id, "the peer is gone") for handoff_id in lost)
        return KvReports(failed_recving=failed, released=lost)


def test_without_recomputation_a_lost_prompt_fails_as_retryable() -> None:
    handoff_id = HandoffId("a", 1)
    receive = ReceiveKv(handoff_id, Peer(NodeId("p"), "host:1"))

    async def lose() -> None:
        core = an_engine(drivers=[LosesAll()], load_failure=LoadFailurePolicy.FAIL)
        with EngineThread(core) as engine, EngineCalls(engine, NodeChanges()) as calls:
            with pytest.raises(KvLoadFailed, match="the peer is gone") as failure:
                await collect(calls, replace(engine_request("a"), receive_from=receive))
            assert status_of(failure.value).code == StatusCode.UNAVAILABLE.value[0]

    asyncio.run(asyncio.wait_for(lose(), PATIENCE_S))


class HeldRunner(SynchronousRunner):
    """Runner whose pass ends the engine, once a test lets it."""

    def __init__(self) -> None:
        self.is_inside, self.may_end = threading.Event(), threading.Event()

    def run(self, plan: Plan) -> RunResult:
        self.is_inside.set()
        self.may_end.wait(PATIENCE_S)
        raise ZeroDivisionError("a bug")


def test_a_reset_ends_with_an_error_if_the_engine_fails_before_its_turn() -> None:
    runner = HeldRunner()
    core = an_engine(runner=runner)

    async def reset_while_it_fails() -> None:
        with EngineThread(core) as engine:
            engine.submit(engine_request("a"))
            await asyncio.to_thread(runner.is_inside.wait, PATIENCE_S)
            reset = asyncio.ensure_future(reset_prefix_cache(engine, core.scheduler, ()))
            abandoned = asyncio.ensure_future(reset_prefix_cache(engine, core.scheduler, ()))
            await asyncio.sleep(0)
            abandoned.cancel()
            runner.may_end.set()
            with pytest.raises(EngineStopped, match="a bug"):
                await reset
            with pytest.raises(EngineStopped):
                await reset_prefix_cache(engine, core.scheduler, ())

    asyncio.run(asyncio.wait_for(reset_while_it_fails(), PATIENCE_S))


def test_a_refused_request_leaves_no_request_running() -> None:
    async def refused() -> int:
        with EngineThread(an_engine()) as engine, EngineCalls(engine, NodeChanges()) as calls:
            with pytest.raises(InvalidRequest):
                await collect(calls, engine_request("a", prompt=()))
            return calls.num_unfinished

    assert asyncio.run(refused()) == 0
