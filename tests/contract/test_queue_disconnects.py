"""Clients that disconnect or time out while their request is in the admission queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Generation
from baton.core.sampling import SamplingParams
from baton.router.admission.admission_queue import AdmissionQueueConfig
from tests.support.node_calls import FakeNodeCalls
from tests.support.routers import UnreliableRouter, a_router

PATIENCE_S = 30
ONE_AT_A_TIME = AdmissionQueueConfig(max_in_flight=1, max_queue=1)
FIRST, LEAVER, NEXT, REFUSED = (1,), (2,), (3,), (4,)

Leave = Callable[[UnreliableRouter, str], Awaitable[None]]


def named(request_id: str) -> Generation:
    return Generation(SamplingParams(max_tokens=6), request_id=request_id)


async def until_in_line(router: UnreliableRouter) -> None:
    """Wait until the prompt is tokenized: its request is in the queue then."""
    await router.text.read.get()


async def cancel(router: UnreliableRouter, address: str) -> None:
    async with AsyncClient(address) as client:
        asking = asyncio.ensure_future(client.generate(LEAVER, named("leaver")))
        await until_in_line(router)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def run_out_of_time(router: UnreliableRouter, address: str) -> None:
    async with AsyncClient(address) as client:
        await client.model()  # the connection is there: the time is for the request alone
        asking = asyncio.ensure_future(client.generate(LEAVER, named("leaver"), timeout_s=1.0))
        await until_in_line(router)
        with pytest.raises(BatonError) as late:
            await asking
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def hang_up(router: UnreliableRouter, address: str) -> None:
    """Close the whole connection, as when a client's process is killed."""
    client = AsyncClient(address)
    asking = asyncio.ensure_future(client.generate(LEAVER, named("leaver")))
    await until_in_line(router)
    await client.__aexit__(None, None, None)
    with pytest.raises((BatonError, asyncio.CancelledError)):
        await asking


@pytest.mark.parametrize("leave", [cancel, run_out_of_time, hang_up])
def test_a_request_cancelled_in_the_queue_frees_its_slot_and_reaches_no_node(leave: Leave) -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario() -> None:
        async with (
            a_router(node_calls=nodes, admission_queue=ONE_AT_A_TIME) as (router, address),
            AsyncClient(address) as client,
        ):
            async with aclosing(client.stream(FIRST, named("first"))) as first:
                await anext(first)
                await until_in_line(router)
                await nodes.decode_told_all.wait()
                nodes.is_endless = False  # the requests behind it complete

                await leave(router, address)
                assert await router.ended.get() == "leaver"

                following = asyncio.ensure_future(client.generate(NEXT, named("next")))
                await until_in_line(router)
                with pytest.raises(BatonError) as full:
                    await client.generate(REFUSED, named("refused"))
            answer = await following
            await router.pipeline.drain()

        assert full.value.reason == "QUEUE_FULL"
        assert len(answer.token_ids) == 6
        assert {requested.request.prompt_token_ids for requested in nodes.received} == {FIRST, NEXT}

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
