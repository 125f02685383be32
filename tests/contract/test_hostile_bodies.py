"""Hostile bodies over HTTP: errors in the format of the API, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from tests.support.hostile_bodies import messages_requests, responses_requests
from tests.support.http_routers import an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer

MAX_S = 60
CHAT = {"max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
batches_of_messages = st.lists(messages_requests, min_size=10, max_size=10)
batches_of_responses = st.lists(responses_requests, min_size=10, max_size=10)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


@settings(max_examples=5, deadline=None)
@given(batches_of_messages, batches_of_responses)
def test_hostile_bodies_are_refused_by_name_and_leave_nothing_behind(
    text: TextBoundary, messages: list[dict[str, Any]], responses: list[dict[str, Any]]
) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(MAX_S),
            an_http_router(text=text) as router,
            httpx2.AsyncClient(base_url=router.url, timeout=MAX_S) as client,
        ):
            sent = [("/v1/messages", {**body, "max_tokens": 2}) for body in messages]
            sent += [("/v1/messages/count_tokens", to_count(body)) for body in messages]
            sent += [("/v1/responses", {**body, "max_output_tokens": 2}) for body in responses]
            sent += [("/v1/responses/compact", {"model": "", **body}) for body in responses]
            answers = await asyncio.gather(
                *(client.post(path, content=json.dumps(body)) for path, body in sent)
            )
            bystander = await client.post("/v1/chat/completions", json=CHAT)

            assert bystander.status_code == 200
            for (path, _), answer in zip(sent, answers, strict=True):
                check_answer(path, answer)
            assert router.pipeline.traffic.num_in_flight == 0
            await asyncio.wait_for(router.pipeline.drain(), MAX_S)

    asyncio.run(run())


def to_count(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "max_tokens"}


def check_answer(path: str, answer: httpx2.Response) -> None:
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.status_code == 200:
        return
    body = answer.json()
    assert body["error"]["message"]
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
        assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
    else:
        assert body["error"]["type"] == "invalid_request_error"
        assert body["error"]["code"]
