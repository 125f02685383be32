"""OpenAI's Responses API over HTTP, with fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from baton.rpc.security.token import AcceptedTokens
from tests.support.http_routers import an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls

MAX_S = 60
ASK: dict[str, Any] = {"model": "tiny", "input": "the quick", "max_output_tokens": 4}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


def with_router(
    scenario: Callable[[AsyncOpenAI], Awaitable[None]],
    nodes: FakeNodeCalls | None = None,
    **around: Any,
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(MAX_S),
            an_http_router(nodes, **around) as router,
            AsyncOpenAI(base_url=f"{router.url}/v1", api_key="one", max_retries=0) as client,
        ):
            await scenario(client)

    asyncio.run(run())


def test_the_usage_counts_cached_tokens(text: TextBoundary) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        answer = await client.responses.create(**ASK)
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 3
        assert answer.usage.output_tokens == 4

    with_router(scenario, FakeNodeCalls(num_cached_on_prefill=3), text=text)


def test_a_node_that_fails_after_the_first_event_fails_the_response(text: TextBoundary) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        stream = await client.responses.create(**ASK, stream=True)
        events = [event async for event in stream]
        assert events[0].type == "response.created"
        failed = events[-1]
        assert failed.type == "response.failed"
        assert failed.response.status == "failed"
        assert failed.response.error is not None
        assert failed.response.error.code == "server_error"

    with_router(scenario, FakeNodeCalls(decode_breaks_after=[1] + [0] * 9), text=text)


def test_a_response_belongs_to_the_token_that_asked_for_it(text: TextBoundary) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        other = client.with_options(api_key="other")
        stored = await client.responses.create(**ASK)
        with pytest.raises(Exception, match="not found"):
            await other.responses.retrieve(stored.id)
        with pytest.raises(Exception, match="not found"):
            await other.responses.delete(stored.id)
        with pytest.raises(Exception, match="not found"):
            await other.responses.create(**ASK, previous_response_id=stored.id)
        assert (await client.responses.retrieve(stored.id)).id == stored.id

    tokens = AcceptedTokens(("one", "other"))
    with_router(scenario, text=text, tokens=tokens)


def test_an_id_cannot_be_chosen_by_a_client(text: TextBoundary) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        chosen = {"x-request-id": "mine"}
        ids = [(await client.responses.create(**ASK, extra_headers=chosen)).id for _ in range(2)]
        assert ids[0] != ids[1]
        assert "mine" not in "".join(ids)

    with_router(scenario, text=text)
