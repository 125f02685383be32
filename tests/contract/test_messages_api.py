"""Anthropic's Messages API over HTTP, with fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.kv_hints import KvHints
from baton.core.legs import LegKind
from baton.core.output import FinishReason
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from baton.rpc.errors import NodeFailed
from baton.rpc.security.token import AcceptedTokens
from tests.support.http_routers import an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls

MAX_S = 60
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 6,
    "messages": [{"role": "user", "content": "the quick"}],
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


def with_router(
    scenario: Callable[[httpx2.AsyncClient], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    **around: Any,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(MAX_S),
            an_http_router(nodes, **around) as router,
            httpx2.AsyncClient(base_url=router.url) as client,
        ):
            await scenario(client)

    asyncio.run(run())


def events_in(body: str) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which names its type twice."""
    events = []
    for event in body.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_stream_begins_and_ends_as_anthropics_does(text: TextBoundary) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        whole = (await client.post("/v1/messages", json=BODY)).json()
        events = events_in((await client.post("/v1/messages", json={**BODY, "stream": True})).text)
        counted = {name: BODY[name] for name in ("model", "messages")}
        count = (await client.post("/v1/messages/count_tokens", json=counted)).json()

        first, *content, delta, last = events
        assert first["message"]["usage"]["input_tokens"] == count["input_tokens"]
        assert {event["type"].partition("_")[0] for event in content} == {"content"}
        streamed = "".join(event["delta"]["text"] for event in content if "delta" in event)
        assert [{"type": "text", "text": streamed}] == whole["content"]
        stop = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        assert (delta["delta"], delta["usage"]) == (stop, whole["usage"])
        assert last == {"type": "message_stop"}
        used = whole["usage"]
        assert used["input_tokens"] + used["cache_read_input_tokens"] == count["input_tokens"]
        assert (used["cache_read_input_tokens"], used["output_tokens"]) == (3, 6)

    with_router(scenario, FakeNodeCalls(num_cached_on_prefill=3), text=text)


def test_cache_control_and_the_session_are_hints_for_the_nodes(text: TextBoundary) -> None:
    nodes = FakeNodeCalls()

    async def scenario(client: httpx2.AsyncClient) -> None:
        system = [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}]
        body, session = {**BODY, "system": system}, {"x-session-id": "s"}
        await client.post("/v1/messages", json=body, headers=session)

    with_router(scenario, nodes, text=text)
    [hints] = [each.request.kv_hints for each in nodes.received if each.leg is LegKind.PREFILL]
    assert hints == KvHints("s", 300.0)


def test_an_answer_cut_off_by_the_context_says_so(text: TextBoundary) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        full = (await client.post("/v1/messages", json={**BODY, "max_tokens": 5000})).json()
        assert full["stop_reason"] == "model_context_window_exceeded"
        assert full["warnings"][0].startswith("max_tokens 5000 was lowered")

    with_router(scenario, text=text)


def test_an_answer_that_the_model_ends_is_an_end_of_turn(text: TextBoundary) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        ended = (await client.post("/v1/messages", json=BODY)).json()
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)

    with_router(
        scenario,
        FakeNodeCalls(ends_by=FinishReason.STOP, stop_token_id=EOS_TOKEN_ID),
        text=text,
    )


@pytest.mark.parametrize(
    ("path", "fields", "status", "kind"),
    [
        ("", {"temperature": -1}, 400, "invalid_request_error"),
        ("", {"model": "other"}, 404, "not_found_error"),
        (
            "",
            {"messages": [{"role": "user", "content": "fox " * 900}]},
            400,
            "invalid_request_error",
        ),
        ("/count_tokens", {"messages": 7}, 400, "invalid_request_error"),
        ("/batches", {}, 404, "not_found_error"),
    ],
)
def test_a_refusal_has_anthropics_format(
    path: str, fields: dict[str, Any], status: int, kind: str, text: TextBoundary
) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        for is_streamed in (False, True):
            body = {**BODY, "stream": is_streamed, **fields}
            refused = await client.post(f"/v1/messages{path}", json=body)
            assert refused.status_code == status
            failure = refused.json()
            assert failure["type"] == "error"
            assert failure["error"]["type"] == kind
            assert failure["error"]["message"]

    with_router(scenario, text=text)


def test_a_wrong_method_and_an_unreadable_body_are_refused_in_the_same_format() -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        got = await client.get("/v1/messages")
        assert (got.status_code, got.json()["type"]) == (405, "error")
        sent = await client.post("/v1/messages", content=b"{")
        assert (sent.status_code, sent.json()["error"]["reason"]) == (400, "UNREADABLE")
        assert sent.headers["request-id"] == sent.headers["x-request-id"]

    with_router(scenario)


def test_a_node_that_fails_after_the_first_event_ends_the_stream_with_an_error(
    text: TextBoundary,
) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        body = {**BODY, "stream": True}
        failed = await client.post("/v1/messages", json=body)
        events = events_in(failed.text)
        assert events[0]["type"] == "message_start"
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")

    with_router(scenario, FakeNodeCalls(decode_breaks_after=[1] + [0] * 9), text=text)


def test_a_failure_before_the_first_event_has_its_status(text: TextBoundary) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        failed = await client.post("/v1/messages", json={**BODY, "stream": True})
        assert (failed.status_code, failed.json()["error"]["type"]) == (503, "overloaded_error")

    faults: list[Exception] = [NodeFailed("broken")] * 9
    nodes = FakeNodeCalls(prefill_faults=faults, decode_breaks_after=[0] * 9)
    with_router(scenario, nodes, text=text)


def test_the_token_is_read_from_anthropics_header(text: TextBoundary) -> None:
    async def scenario(client: httpx2.AsyncClient) -> None:
        missing = await client.post("/v1/messages", json=BODY)
        assert (missing.status_code, missing.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )
        for name, key in (("x-api-key", "wrong"), ("authorization", "Bearer wrong")):
            wrong = {"x-api-key": "secret", name: key}
            assert (await client.post("/v1/messages", json=BODY, headers=wrong)).status_code == 401
        right = await client.post("/v1/messages", json=BODY, headers={"x-api-key": "secret"})
        assert right.status_code == 200

    with_router(scenario, text=text, tokens=AcceptedTokens(("secret",)))
