"""Responses over WebSocket, with fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.legs import LegKind
from baton.router.admission.rate_limits import RateLimitConfig
from baton.router.doors.responses.websocket.session import SessionLimits
from baton.router.http.connection_slots import ConnectionLimits
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from baton.rpc.security.token import AcceptedTokens
from tests.support.hostile_bodies import responses_requests
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls
from tests.support.open_responses import SOCKET_ERROR
from tests.support.response_sockets import ASK, ResponseSocket, a_response_socket
from tests.support.waits import until

MAX_S = 60
SOON_S = 0.05
GOING_AWAY, NORMAL = 1001, 1000


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


def with_socket(
    scenario: Callable[[HttpRouter, ResponseSocket], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    **around: Any,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(MAX_S),
            an_http_router(nodes, **around) as router,
            a_response_socket(router.address, {"authorization": "Bearer one"}) as client,
        ):
            await scenario(router, client)

    asyncio.run(run())


def code_of(event: dict[str, Any]) -> str:
    Draft202012Validator(SOCKET_ERROR).validate(event)
    return str(event["error"]["code"])


def test_requests_are_answered_in_their_order_each_in_its_stream(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        for stream_id in ("a", "b"):
            await client.send(stream_id=stream_id)
        await client.send()
        for expected in ("a", "b", None):
            events = await client.receive_all()
            assert {event.get("stream_id") for event in events} == {expected}
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.incomplete"
        assert code_of(await client.ask(stream_id="no/name")) == "invalid_stream_id"
        many = [await client.ask(stream_id=f"{number}", input="") for number in range(30)]
        assert many[-1]["type"] == "response.incomplete"
        refused = await client.ask(stream_id="one more")
        assert code_of(refused) == "invalid_stream_id"
        refused = await client.ask(stream_id="one.more")
        assert code_of(refused) == "websocket_stream_limit_reached"
        assert refused["stream_id"] == "one.more"

    with_socket(scenario, text=text)


def test_each_stream_continues_its_last_response_until_that_fails(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        first, other = [
            (await client.ask(store=False, stream_id=name))["response"] for name in ("a", "b")
        ]
        longer = await client.ask(store=False, stream_id="a", previous_response_id=first["id"])
        assert longer["response"]["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        again = await client.ask(store=False, stream_id="a", previous_response_id=first["id"])
        assert code_of(again) == "previous_response_not_found"
        forked = await client.ask(store=False, stream_id="c", previous_response_id=other["id"])
        assert forked["response"]["previous_response_id"] == other["id"]
        output = {"type": "function_call_output", "call_id": "none", "output": "4"}
        failed = await client.ask(store=False, previous_response_id=other["id"], input=[output])
        assert failed["error"]["param"] == "input.0.call_id"
        evicted = await client.ask(store=False, previous_response_id=other["id"])
        assert code_of(evicted) == "previous_response_not_found"
        stored = (await client.ask())["response"]["id"]
        assert "error" in await client.ask(previous_response_id=stored, input=[output])
        async with a_response_socket(router.address) as another:
            resumed = await another.ask(previous_response_id=stored)
            assert resumed["response"]["previous_response_id"] == stored
            foreign = await another.ask(previous_response_id=forked["response"]["id"])
            assert code_of(foreign) == "previous_response_not_found"

    with_socket(scenario, text=text)


def test_a_warm_up_computes_the_prompt_and_is_continued(text: TextBoundary) -> None:
    nodes = FakeNodeCalls()

    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        await client.send(generate=False, input=[], instructions="be brief", min_tokens=4)
        events = await client.receive_all()
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        warm = events[-1]["response"]
        assert (warm["status"], warm["output"]) == ("completed", [])
        prompts = [call.request for call in nodes.received if call.leg is LegKind.PREFILL]
        assert prompts[0].sampling.max_tokens == 1
        answer = await client.ask(previous_response_id=warm["id"], instructions="be brief")
        assert answer["response"]["output"]
        for wrong in ({"generate": "no"}, {"stream": False}, {"background": True}):
            assert (await client.ask(**wrong))["error"]["param"] in wrong

    with_socket(scenario, nodes, text=text)


def test_a_client_that_vanishes_cancels_its_requests(text: TextBoundary) -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        await client.send(max_output_tokens=100)
        await client.send()  # waits
        while (await client.receive())["type"] != "response.output_text.delta":
            """The first events belong to the response."""
        assert router.pipeline.traffic.num_in_flight == 1
        client.connection.transport.abort()

        await router.pipeline.drain()

        assert nodes.left == [LegKind.DECODE]
        assert router.pipeline.traffic.num_in_flight == 0

    with_socket(scenario, nodes, text=text)


def test_a_client_that_does_not_read_is_cut_off(text: TextBoundary) -> None:
    nodes = FakeNodeCalls(is_endless=True)

    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        client.connection.transport.pause_reading()
        await client.send(prompt_cache_key="k" * (6 << 20))  # responses repeat it
        await until(lambda: router.pipeline.traffic.num_in_flight)

        await router.pipeline.drain()

        client.connection.transport.abort()
        assert nodes.left == [LegKind.DECODE]

    with_socket(scenario, nodes, text=text, limits=ConnectionLimits(unread_s=SOON_S))


def test_only_so_many_requests_of_a_connection_wait(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        await client.send(max_output_tokens=100)
        while (await client.receive())["type"] != "response.output_text.delta":
            """The others wait for this one."""
        for _ in range(2):
            await client.send()
        event = await client.receive()
        while event["type"] != "error":
            event = await client.receive()
        assert (event["status"], code_of(event)) == (429, "rate_limit_exceeded")
        assert event["error"]["headers"]["retry-after"] == "1"

    limits = SessionLimits(max_pending=1)
    with_socket(scenario, FakeNodeCalls(is_endless=True), text=text, sessions=limits)


def test_rate_limits_count_each_request(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        first, second = await client.ask(), await client.ask()
        assert first["type"] == "response.incomplete"
        assert second["error"]["reason"] == "RATE_LIMITED"
        assert second["error"]["headers"]["x-ratelimit-limit-requests"] == "1"
        async with a_response_socket(router.address, {"x-api-key": "two"}) as other:
            assert (await other.ask())["type"] == "response.incomplete"

    limits = RateLimitConfig(client_requests_per_minute=1)
    tokens = AcceptedTokens(("one", "two"))
    with_socket(scenario, text=text, rate_limits=limits, tokens=tokens)


def test_a_connection_ends_after_its_time(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        event = await client.receive()
        assert code_of(event) == "websocket_connection_limit_reached"
        assert await client.wait_for_close() == NORMAL

    with_socket(scenario, text=text, sessions=SessionLimits(max_age_s=SOON_S))


def test_a_response_in_progress_outlives_the_time_of_its_connection(text: TextBoundary) -> None:
    may_end = asyncio.Event()
    nodes = FakeNodeCalls(may_prefill_report=may_end, is_prefill_late=True)

    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        for _ in range(2):
            await client.send()
        await nodes.decode_told_all.wait()
        await asyncio.sleep(SOON_S)
        may_end.set()
        assert (await client.receive_all())[-1]["type"] == "response.incomplete"
        assert code_of(await client.receive()) == "websocket_connection_limit_reached"
        assert await client.wait_for_close() == NORMAL

    with_socket(scenario, nodes, text=text, sessions=SessionLimits(max_age_s=SOON_S))


def test_a_router_that_stops_answers_what_runs_and_closes(text: TextBoundary) -> None:
    nodes = FakeNodeCalls(may_prefill_report=asyncio.Event(), is_prefill_late=True)

    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        async with a_response_socket(router.address) as idle:
            await client.send()
            await nodes.decode_told_all.wait()
            draining = asyncio.ensure_future(router.pipeline.drain())
            await asyncio.sleep(0)
            refused = await idle.ask()
            assert refused["error"]["reason"] == "DRAINING"
            assert await idle.wait_for_close() == GOING_AWAY
            nodes.may_prefill_report.set()  # type: ignore[union-attr]
            assert (await client.receive_all())[-1]["type"] == "response.incomplete"
            assert await client.wait_for_close() == GOING_AWAY
            await draining

    with_socket(scenario, nodes, text=text)


def test_connections_that_wait_are_closed_with_the_server(text: TextBoundary) -> None:
    async def run() -> None:
        async with asyncio.timeout(MAX_S), AsyncExitStack() as serving:
            router = await serving.enter_async_context(an_http_router(text=text))
            async with a_response_socket(router.address) as client:
                await client.ask()
                await serving.aclose()
                assert await client.wait_for_close() == GOING_AWAY

    asyncio.run(run())


def test_a_connection_that_waits_gives_way_to_a_new_one_and_one_that_answers_does_not(
    text: TextBoundary,
) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        await client.send(max_output_tokens=100)
        while (await client.receive())["type"] != "response.output_text.delta":
            """Only now the connection certainly answers."""
        async with a_response_socket(router.address) as waiting:
            async with a_response_socket(router.address):
                await waiting.wait_for_close()
            assert router.pipeline.traffic.num_in_flight == 1
            assert client.connection.close_code is None

    limits = ConnectionLimits(max_connections=2)
    with_socket(scenario, FakeNodeCalls(is_endless=True), text=text, limits=limits)


def test_a_connection_outlives_the_timeouts_of_http(text: TextBoundary) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        host, _, port = router.address.rpartition(":")
        silent, writing = await asyncio.open_connection(host, int(port))
        assert await silent.read() == b""  # its timeout, which began later, expired
        writing.close()
        assert (await client.ask())["type"] == "response.incomplete"

    with_socket(scenario, text=text, limits=ConnectionLimits(head_s=SOON_S, body_s=SOON_S))


events = st.one_of(
    responses_requests.map(lambda fields: json.dumps({**ASK, **fields})),
    st.dictionaries(
        st.sampled_from(["type", "generate", "stream", "stream_id", "previous_response_id"]),
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    ).map(lambda fields: json.dumps({**ASK, **fields})),
    st.text(max_size=20),
    st.sampled_from(
        ["[" * 10_000, '{"type":' * 999, "1e999", '"\ud800"'.encode("utf-8", "replace").decode()]
    ),
)


@settings(max_examples=5, deadline=None)
@given(st.lists(events, min_size=20, max_size=20))
def test_hostile_events_are_refused_by_name_and_leave_nothing(
    text: TextBoundary, sent: list[str]
) -> None:
    async def scenario(router: HttpRouter, client: ResponseSocket) -> None:
        for message in sent:
            await client.connection.send(message)
            last = (await client.receive_all())[-1]
            if last["type"] == "error":
                assert code_of(last)
                assert last["status"] in (400, 404)
        assert (await client.ask())["type"] == "response.incomplete"
        assert router.pipeline.traffic.num_in_flight == 0

    with_socket(scenario, text=text)
