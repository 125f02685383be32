"""Prompts that vLLM servers compute for the router, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from baton.core.legs import LegKind
from baton.router.discovery.sources import VllmServer
from baton.router.dispatch.foreign_prefills import ComputedKv
from baton.router.dispatch.vllm.prefills import VllmPrefills
from baton.router.dispatch.vllm.servers import PrefillServers, ServerLoad, key_of
from baton.router.routing.node_table import NodeTable
from baton.rpc.node_info import NodeAvailability
from tests.support.fake_vllm_api import PARAMS, FakeApi, serving
from tests.support.node_calls import a_node

TOKENS = tuple(range(100))
MODEL = "tiny"


def checked(addresses: Sequence[VllmServer], clock: Callable[[], float]) -> VllmPrefills:
    """Return healthy servers that have passed their checks with the only decode node."""
    table, node = NodeTable(), a_node(LegKind.DECODE, "d")
    table.join(node.address, node.card)
    servers = PrefillServers(addresses, table, clock)
    for server in servers.all:
        server.trouble, server.model, server.engine_id = "", "served", "engine"
        server.mismatches[key_of(node)] = ""
    return VllmPrefills(servers, clock)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 30))


def test_a_prompt_is_computed_and_its_kv_named() -> None:
    async def test() -> None:
        api, now = FakeApi(), [50.0]
        async with serving(api) as addresses:
            prefills = checked(addresses, lambda: now[0])
            computed = await prefills.compute(MODEL, TOKENS, None)
            assert computed is not None
            assert (computed.kv.address, computed.kv.block_ids) == ("vllm:5600", (1, 2))
            assert computed.readers == {"d:1"}
            now[0] = 53.0
            assert computed.aged(now[0]).age_s == 3.0
            [body] = api.bodies
            assert body["prompt"] == list(TOKENS)
            assert (body["model"], body["max_tokens"]) == ("served", 1)
            assert body["kv_transfer_params"]["do_remote_decode"]
            assert await prefills.compute("other", TOKENS, None) is None

    run(test)


BROKEN: dict[str, tuple[str, dict[str, Any] | bytes]] = {
    "error": ("500 Internal Server Error", {"error": "broken"}),
    "no JSON": ("200 OK", b"{"),
    "no object": ("200 OK", b"[1]"),
    "no connector": ("200 OK", {"choices": []}),
    "null": ("200 OK", {"kv_transfer_params": None}),
    "a text": ("200 OK", {"kv_transfer_params": "text"}),
    "other parameters": ("200 OK", {"kv_transfer_params": PARAMS | {"tp_size": 2}}),
    "deep": ("200 OK", b"[" * 100_000),
    "nothing": ("200 OK", b""),
    "restarted": ("200 OK", {"kv_transfer_params": PARAMS | {"remote_engine_id": "engine-2"}}),
}


@pytest.mark.parametrize(("status", "answer"), BROKEN.values(), ids=BROKEN)
def test_the_next_server_is_asked_when_one_fails(
    status: str, answer: dict[str, Any] | bytes, request: pytest.FixtureRequest
) -> None:
    """It is avoided for a growing time, and then gets one request; a success ends that."""

    async def test() -> None:
        broken, good = FakeApi(), FakeApi()
        broken.status, broken.answer = status, answer
        now = [0.0]
        async with serving(broken, good) as addresses:
            prefills = checked(addresses, lambda: now[0])

            async def num_asked() -> int:
                assert isinstance(await prefills.compute(MODEL, TOKENS, None), ComputedKv)
                return len(broken.bodies)

            assert [await num_asked() for _ in range(2)] == [1, 1]
            report = {status.address: status for status in prefills.servers.report()}
            assert report[str(addresses[0])].state is not NodeAvailability.READY
            assert report[str(addresses[0])].reason
            assert report[str(addresses[1])].state is NodeAvailability.READY
            if request.node.callspec.id == "restarted":
                assert not prefills.servers.all[0].mismatches  # its check is repeated
                return
            now[0] = 1.1
            assert [await num_asked() for _ in range(2)] == [2, 2]
            now[0] = 2.2  # the second pause is longer
            assert await num_asked() == 2
            now[0], broken.status, broken.answer = 4.0, "200 OK", {"kv_transfer_params": PARAMS}
            assert [await num_asked() for _ in range(2)] == [3, 4]

    run(test)


def test_without_a_server_that_works_nothing_is_computed() -> None:
    async def test() -> None:
        async with serving(FakeApi()) as addresses:
            pass
        assert await checked(addresses, lambda: 0.0).compute(MODEL, TOKENS, None) is None
        assert await checked((), lambda: 0.0).compute(MODEL, TOKENS, None) is None

    run(test)


def test_a_cancelled_request_closes_its_connection() -> None:
    async def test() -> None:
        api = FakeApi()
        api.begins = asyncio.Event()
        async with serving(api) as addresses:
            prefills = checked(addresses, lambda: 0.0)
            computing = asyncio.ensure_future(prefills.compute(MODEL, TOKENS, None))
            await api.begins.wait()
            assert [server.num_tokens for server in prefills.servers.all] == [len(TOKENS)]
            computing.cancel()
            await api.is_cancelled.wait()
            assert [server.num_tokens for server in prefills.servers.all] == [0]

    run(test)


def test_a_late_server_is_given_up() -> None:
    async def test() -> None:
        api = FakeApi()
        api.begins = asyncio.Event()
        async with serving(api) as addresses:
            assert await checked(addresses, lambda: 0.0).compute(MODEL, TOKENS, 0.05) is None
            await api.is_cancelled.wait()

    run(test)


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_a_refused_prompt_closes_no_server(status: str) -> None:
    async def test() -> None:
        apis = FakeApi(), FakeApi()
        async with serving(*apis) as addresses:
            prefills = checked(addresses, lambda: 0.0)
            for api in apis:
                api.status, api.answer = status, {"error": "the prompt is too long"}
            assert await prefills.compute(MODEL, TOKENS, None) is None
            assert [len(api.bodies) for api in apis] == [1, 0]  # the other would refuse it, too
            for api in apis:
                api.status, api.answer = "200 OK", {"kv_transfer_params": PARAMS}
            assert await prefills.compute(MODEL, TOKENS, None) is not None
            assert [len(api.bodies) for api in apis] == [2, 0]

    run(test)


def test_a_server_that_is_gone_gives_up_its_prompts_at_once() -> None:
    async def test() -> None:
        frozen, good = FakeApi(), FakeApi()
        frozen.begins = asyncio.Event()
        async with serving(frozen, good) as addresses:
            prefills = checked(addresses, lambda: 0.0)
            computing = asyncio.ensure_future(prefills.compute(MODEL, TOKENS, None))
            await frozen.begins.wait()
            for _ in range(2):  # each poll of its health finds it gone
                prefills.servers.all[0].note_gone("its health check took too long")
            computed = await computing
            assert computed is not None
            assert computed.server == str(addresses[1])
            assert not prefills.servers.all[0].timers

    run(test)


LOADS = [
    (ServerLoad(num_running=5), ServerLoad(num_running=9), 0),
    (ServerLoad(num_waiting=2), ServerLoad(num_running=3), 1),  # prompts that wait cost more
    (ServerLoad(kv_usage=0.97), ServerLoad(num_waiting=9), 1),  # no room
    (ServerLoad(), ServerLoad(), 0),
]


@pytest.mark.parametrize(("first", "second", "best"), LOADS)
def test_the_least_loaded_server_is_chosen(
    first: ServerLoad, second: ServerLoad, best: int
) -> None:
    servers = checked([VllmServer("a", 1), VllmServer("b", 1)], lambda: 0.0).servers
    servers.all[0].load, servers.all[1].load = first, second
    assert servers.choose(MODEL, 200)[0] is servers.all[best]
    servers.all[best].num_tokens = 10_000  # sent by this router, and not reported yet
    servers.all[best].num_sent = 1
    assert (servers.choose(MODEL, 200)[0] is servers.all[best]) is (second.num_waiting == 9)
