"""Deadlines of node RPCs over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from baton.core.ids import RequestId
from baton.core.legs import GENERATING, LegKind
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.router.dispatch.node_calls import GrpcNodeCalls
from baton.router.dispatch.node_rpcs import LegEvent
from baton.router.routing.policy import Leg
from baton.router.routing.served_models import Node
from baton.rpc.errors import DeadlineExceeded, MessageTooLarge
from baton.rpc.messages.limits import MAX_MESSAGE_BYTES
from baton.v1 import node_pb2
from tests.support.node_calls import a_card
from tests.support.scripted_node import ScriptedNode, serve_scripted_node

PATIENCE_S = 30
REQUEST = EngineRequest(RequestId("r#1"), (1, 2, 3), SamplingParams(), seed=1)
OTHER = replace(REQUEST, request_id=RequestId("other#1"))


def ignore(event: LegEvent) -> None:
    """Drop the event: only the end of the call matters."""


@asynccontextmanager
async def calls_to(
    called: ScriptedNode, role: LegKind = LegKind.DECODE
) -> AsyncIterator[tuple[GrpcNodeCalls, Leg]]:
    async with serve_scripted_node(called) as address, GrpcNodeCalls() as calls:
        yield calls, Leg(role, Node(address, a_card(role)))


@pytest.mark.parametrize("role", GENERATING)
def test_a_node_receives_the_remaining_time_and_enforces_the_deadline(role: LegKind) -> None:
    async def scenario() -> None:
        called = ScriptedNode()
        async with calls_to(called, role) as (calls, leg):
            asked_s = time.monotonic()

            with pytest.raises(DeadlineExceeded, match=f"{role.value} node {role.value}"):
                await calls.call(leg, REQUEST, ignore, timeout_s=0.3)

            reported = await called.calls.get()
            await reported.left.wait()
        deadline_s = reported.context.deadline_s
        assert deadline_s is not None
        assert reported.order.context.timeout_s == 0.3
        assert deadline_s >= asked_s + 0.3

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_a_request_without_a_deadline_sends_none_to_the_node() -> None:
    async def scenario() -> None:
        called = ScriptedNode()
        async with calls_to(called) as (calls, leg):
            requested = asyncio.ensure_future(calls.call(leg, REQUEST, ignore))

            reported = await called.calls.get()
            assert reported.context.deadline_s is None

            requested.cancel()
            await reported.left.wait()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_an_oversized_answer_is_not_a_node_failure() -> None:
    too_large = node_pb2.CallEvent(output=node_pb2.TokenOutput(error="x" * (MAX_MESSAGE_BYTES + 1)))

    async def scenario() -> None:
        called = ScriptedNode()
        async with calls_to(called) as (calls, leg):
            other = calls.call(leg, OTHER, ignore)
            going_on = asyncio.ensure_future(other)
            other_on_node = await called.calls.get()
            requested = asyncio.ensure_future(calls.call(leg, REQUEST, ignore))
            (await called.calls.get()).script.put_nowait(too_large)

            with pytest.raises(MessageTooLarge, match="larger than max"):
                await requested

            other_on_node.send_tokens(0)
            other_on_node.end()
            await going_on  # it shares the stream

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_an_oversized_prompt_does_not_affect_other_calls() -> None:
    too_large = replace(REQUEST, prompt_token_ids=(2**31,) * (MAX_MESSAGE_BYTES // 5))

    async def scenario() -> None:
        called = ScriptedNode()
        async with calls_to(called) as (calls, leg):
            other = calls.call(leg, OTHER, ignore)
            going_on = asyncio.ensure_future(other)
            other_on_node = await called.calls.get()

            with pytest.raises(MessageTooLarge, match="larger than max"):
                await calls.call(leg, too_large, ignore)

            other_on_node.send_tokens(0)
            other_on_node.end()
            await going_on

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
