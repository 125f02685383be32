"""Clients that disconnect or time out in any phase: all resources are released."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.client_load import ClientRequest, stream_answer
from tests.support.models import prompt_of, reference_choices, reference_greedy
from tests.support.nodes import await_all_free, await_load, card_at, is_busy
from tests.support.response_sockets import a_response_socket
from tests.support.suspended_processes import suspended

# Long enough to come to where the request is to stand, on a busy machine too.
DEADLINE_S = 2.0
NOT_LOCAL = 300  # tokens of a prompt that decode does not compute, however busy prefill seems
LONG = Generation(SamplingParams(max_tokens=450, temperature=0.0, ignore_eos=True))
SHORT = Generation(SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))

Leave = Callable[[str, ClientRequest, Callable[[], None]], None]


def cancel(address: str, request: ClientRequest, until_reached: Callable[[], None]) -> None:
    async def scenario() -> None:
        async with AsyncClient(address) as client:
            asking = asyncio.ensure_future(stream_answer(client, request))
            await asyncio.to_thread(until_reached)

            asking.cancel()

            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(scenario())


def run_out_of_time(
    address: str, request: ClientRequest, until_reached: Callable[[], None]
) -> None:
    async def scenario() -> None:
        async with AsyncClient(address, timeout_s=DEADLINE_S) as client:
            asking = asyncio.ensure_future(stream_answer(client, request))
            await asyncio.to_thread(until_reached)
            with pytest.raises(BatonError) as late:
                await asking
        assert late.value.code is grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(scenario())


def await_blocks_held_by_a_finished_request(address: str) -> None:
    num_blocks = card_at(address).num_blocks
    await_load(address, lambda load: not is_busy(load) and load.num_free_blocks < num_blocks)


NEW_SEEDS = itertools.count(100)  # of prompts that no node has in its caches


@pytest.fixture(autouse=True)
def _next_request_is_served(
    cluster: LocalCluster, client: Client, model_folder: Path
) -> Iterator[None]:
    """Check after each test that all blocks are free and that the pair answers correctly."""
    yield
    for child in (*cluster.prefills, *cluster.decodes):
        await_all_free(child.address)
    prompt = prompt_of(37, seed=next(NEW_SEEDS))
    answer = client.generate(prompt, SHORT)
    assert answer.token_ids == reference_choices(model_folder, prompt, answer.token_ids, 8)
    assert answer.finish is not None
    assert answer.finish.served.is_prefill_remote


@pytest.mark.parametrize("leave", [cancel, run_out_of_time])
def test_a_client_disconnects_while_decode_waits_for_kv(
    cluster: LocalCluster, leave: Leave
) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes

    with suspended(prefill):
        leave(
            cluster.address,
            ClientRequest(prompt_of(NOT_LOCAL, seed=next(NEW_SEEDS)), LONG),
            partial(await_load, decode.address, is_busy),
        )


@pytest.mark.parametrize("leave", [cancel, run_out_of_time])
def test_a_client_disconnects_while_prefill_waits_for_a_grant(
    cluster: LocalCluster, leave: Leave
) -> None:
    [prefill], [decode] = cluster.prefills, cluster.decodes

    with suspended(decode):
        leave(
            cluster.address,
            ClientRequest(prompt_of(NOT_LOCAL, seed=next(NEW_SEEDS)), LONG),
            partial(await_blocks_held_by_a_finished_request, prefill.address),
        )
        await_all_free(prefill.address)  # it does not wait for decode to agree


def test_a_client_over_websocket_vanishes_during_its_answer(cluster: LocalCluster) -> None:
    address = cluster.router.http_address
    assert address is not None

    async def scenario() -> None:
        async with a_response_socket(address) as client:
            await client.send(model="", ignore_eos=True, max_output_tokens=400)
            while (await client.receive())["type"] != "response.output_text.delta":
                """The first events belong to the response."""
            client.connection.transport.abort()

    asyncio.run(scenario())


def test_clients_disconnect_while_prefill_computes_and_queues(
    cluster: LocalCluster,
) -> None:
    [prefill] = cluster.prefills
    requests = [ClientRequest(prompt_of(400 + number, seed=66), SHORT) for number in range(24)]

    async def scenario() -> None:
        async with AsyncClient(cluster.address) as client:
            asking = [asyncio.ensure_future(stream_answer(client, request)) for request in requests]
            await asyncio.to_thread(await_load, prefill.address, is_busy)
            for one in asking:
                one.cancel()
            ends = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(end, asyncio.CancelledError) for end in ends)

    asyncio.run(scenario())


def test_many_clients_disconnect_at_once_without_affecting_others(
    cluster: LocalCluster, model_folder: Path
) -> None:
    stay = [ClientRequest(prompt_of(20 + n, seed=64), SHORT) for n in range(8)]
    go = [ClientRequest(prompt_of(20 + n, seed=65), LONG) for n in range(24)]

    async def scenario() -> list[list[int]]:
        async with AsyncClient(cluster.address) as client:
            leaving = [asyncio.ensure_future(stream_answer(client, request)) for request in go]
            staying = [asyncio.ensure_future(stream_answer(client, request)) for request in stay]
            for number, reported in enumerate(asyncio.as_completed(staying)):
                await reported
                for asking in leaving[3 * number : 3 * number + 3]:
                    asking.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            return [list(asking.result().token_ids) for asking in staying]

    answers = asyncio.run(scenario())

    assert answers == [reference_greedy(model_folder, request.prompt, 8) for request in stay]
