"""Clients that disconnect or time out while their request waits: in the queue, or for a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import cast

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Generation
from baton.core.sampling import SamplingParams
from baton.core.structured_outputs import StructuredOutputs
from baton.engine.structured_output.compiler import GrammarCompiler
from baton.engine.structured_output.llguidance_backend import Checked
from baton.router.admission.admission_queue import AdmissionQueueConfig
from baton.router.input_processing.form_checks import FormChecks
from tests.support.grammars import GOOD, SLOW, HeldLibrary
from tests.support.node_calls import FakeNodeCalls
from tests.support.routers import UnreliableRouter, a_router

PATIENCE_S = 30
ONE_AT_A_TIME = AdmissionQueueConfig(max_in_flight=1, max_queue=1)
FIRST, LEAVER, NEXT, REFUSED = (1,), (2,), (3,), (4,)

Wait = Callable[[], Awaitable[object]]  # until the leaver's request waits
Leave = Callable[[str, Generation, Wait], Awaitable[None]]


def named(request_id: str, form: StructuredOutputs | None = None) -> Generation:
    sampling = SamplingParams(max_tokens=6, structured_outputs=form)
    return Generation(sampling, request_id=request_id)


async def until_in_line(router: UnreliableRouter) -> None:
    """Wait until the prompt is tokenized: its request is in the queue then."""
    await router.text.read.get()


async def cancel(address: str, leaver: Generation, until_it_waits: Wait) -> None:
    async with AsyncClient(address) as client:
        asking = asyncio.ensure_future(client.generate(LEAVER, leaver))
        await until_it_waits()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def run_out_of_time(address: str, leaver: Generation, until_it_waits: Wait) -> None:
    async with AsyncClient(address) as client:
        await client.model()  # the connection is there: the time is for the request alone
        asking = asyncio.ensure_future(client.generate(LEAVER, leaver, timeout_s=1.0))
        await until_it_waits()
        with pytest.raises(BatonError) as late:
            await asking
    assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def hang_up(address: str, leaver: Generation, until_it_waits: Wait) -> None:
    """Close the whole connection, as when a client's process is killed."""
    client = AsyncClient(address)
    asking = asyncio.ensure_future(client.generate(LEAVER, leaver))
    await until_it_waits()
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

                await leave(address, named("leaver"), lambda: until_in_line(router))
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


@pytest.mark.parametrize("leave", [cancel, run_out_of_time, hang_up])
def test_a_request_cancelled_while_its_grammar_is_compiled_ends_at_once(leave: Leave) -> None:
    nodes, library = FakeNodeCalls(), HeldLibrary()

    async def scenario(compiler: GrammarCompiler[Checked]) -> None:
        forms = FormChecks(compiler, max_waiting=1)
        async with (
            a_router(node_calls=nodes, forms=forms) as (router, address),
            AsyncClient(address) as client,
        ):
            await leave(
                address,
                named("leaver", SLOW),
                lambda: asyncio.to_thread(library.has_begun.wait, PATIENCE_S),
            )
            assert await router.ended.get() == "leaver"
            assert SLOW not in library.compiled  # it is still being compiled

            answer = await client.generate(NEXT, named("next", GOOD))  # has its place
            library.may_end.set()
            await router.pipeline.drain()

        assert len(answer.token_ids) == 6

    try:
        with cast("GrammarCompiler[Checked]", GrammarCompiler(library.compile)) as compiler:
            asyncio.run(scenario(compiler))
    finally:
        library.may_end.set()

    assert {each.request.prompt_token_ids for each in nodes.received} == {NEXT}
