"""One router with several models: chat, embedder and reranker, with fake nodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.client import AsyncClient, BatonError
from baton.core.legs import LegKind
from baton.router.input_processing.model_profiles import ModelProfile, ModelProfiles
from baton.router.input_processing.tokenization import ModelText
from baton.router.routing.node_table import NodeTable
from baton.router.values import Parsing, TextPrompt
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls, a_node_of, a_table, an_embedder, vector_of
from tests.support.routers import a_router

LONGEST_S = 60
CHAT: Any = [{"role": "user", "content": "the quick"}]
Check = Callable[[AsyncOpenAI, HttpRouter, FakeNodeCalls], Awaitable[None]]


@pytest.fixture(scope="module")
def chat_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    folder = tmp_path_factory.mktemp("chat")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


@pytest.fixture(scope="module")
def byte_text(tmp_path_factory: pytest.TempPathFactory) -> ModelText:
    """A tokenizer with other ids than the one of the chat model: one token per byte."""
    return ModelText(load_tokenizer(save_byte_tokenizer(tmp_path_factory.mktemp("bytes"))))


def save_byte_tokenizer(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: place for place, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


def a_table_of_three() -> NodeTable:
    return a_table(
        a_node_of("chat", LegKind.PREFILL),
        a_node_of("chat", LegKind.DECODE),
        an_embedder("embedder"),
        an_embedder("reranker", size=1, has_labels=True),
    )


def run(check: Check, chat_text: ModelText, byte_text: ModelText, *more: ModelProfile) -> None:
    async def main() -> None:
        table, nodes = a_table_of_three(), FakeNodeCalls()
        profiles = ModelProfiles(
            table,
            (
                ModelProfile(chat_text, "chat", parsing=Parsing("hermes"), root="/models/chat"),
                ModelProfile(byte_text, "embedder", root="/models/embedder"),
                ModelProfile(byte_text, "reranker", root="/models/reranker"),
                *more,
            ),
        )
        async with (
            asyncio.timeout(LONGEST_S),
            an_http_router(nodes, table=table, profiles=profiles) as router,
            AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        ):
            await check(client, router, nodes)

    asyncio.run(main())


async def post(client: AsyncOpenAI, router: HttpRouter, path: str, **body: Any) -> Any:
    return (await client._client.post(router.url + path, json=body)).json()


def test_each_request_gets_the_nodes_and_the_tokenizer_of_its_model(
    chat_text: ModelText, byte_text: ModelText
) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter, nodes: FakeNodeCalls) -> None:
        talk = await client.chat.completions.create(model="chat", messages=CHAT, max_tokens=4)
        assert talk.model == "chat"
        assert {received.node for received in nodes.received} == {"chat-prefill", "chat-decode"}
        nodes.received.clear()

        found = await client.embeddings.create(
            model="embedder", input="the quick", encoding_format="float"
        )
        [received] = nodes.received
        assert received.node == "embedder-encode"
        assert received.request.prompt_token_ids == byte_text.token_ids(TextPrompt("the quick"))
        assert np.allclose(found.data[0].embedding, vector_of(received.request.prompt_token_ids))
        nodes.received.clear()

        documents = {"query": "the", "documents": ["quick", "lazy"]}
        ranked = await post(client, router, "/v1/rerank", model="reranker", **documents)
        assert len(ranked["results"]) == 2
        assert {received.node for received in nodes.received} == {"reranker-encode"}

    run(check, chat_text, byte_text)


def test_the_model_may_be_left_out_where_only_one_can_do_the_task(
    chat_text: ModelText, byte_text: ModelText
) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter, nodes: FakeNodeCalls) -> None:
        talk = await post(client, router, "/v1/chat/completions", messages=CHAT, max_tokens=2)
        assert talk["model"] == "chat"
        plain = await post(client, router, "/v1/completions", prompt="the", max_tokens=2)
        assert plain["model"] == "chat"
        refused = (await post(client, router, "/v1/embeddings", input="a"))["error"]
        assert refused["param"] == "model"
        assert refused["message"].endswith("set model to one of: embedder, reranker")
        assert "400" not in refused["message"]

    run(check, chat_text, byte_text)


def test_unknown_models_and_models_that_cannot_do_the_task_are_refused(
    chat_text: ModelText, byte_text: ModelText
) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter, nodes: FakeNodeCalls) -> None:
        served = "served: chat, embedder, reranker"
        with pytest.raises(openai.NotFoundError, match=served):
            await client.chat.completions.create(model="other", messages=CHAT)
        with pytest.raises(openai.NotFoundError, match=served):
            await client.embeddings.create(model="other", input="a")
        with pytest.raises(openai.BadRequestError, match="'embedder' generates no text"):
            await client.chat.completions.create(model="embedder", messages=CHAT)
        with pytest.raises(openai.BadRequestError, match="'chat' does not embed"):
            await client.embeddings.create(model="chat", input="a")
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [3]})):
            error = (await post(client, router, path, model="other", **body))["error"]
            assert served in error["message"]
        assert not nodes.received

    run(check, chat_text, byte_text)


def test_a_named_model_without_nodes_at_the_moment_is_missing_nodes_and_not_unknown(
    chat_text: ModelText, byte_text: ModelText
) -> None:
    embedder, reranker = an_embedder("embedder"), an_embedder("reranker", size=1, has_labels=True)
    ranking = {"query": "the", "documents": ["quick", "lazy"]}

    async def check(client: AsyncOpenAI, router: HttpRouter, nodes: FakeNodeCalls) -> None:
        async def reason_of(path: str, **body: Any) -> str:
            answer = await post(client, router, path, **body)
            return str(answer.get("error", {}).get("reason", "none"))

        for node in (embedder, reranker):
            router.pipeline.table.lose(node.address)
        assert await reason_of("/v1/embeddings", model="embedder", input="a") == "NO_NODES"
        # Whether a model scores pairs is known by its nodes alone.
        assert await reason_of("/v1/rerank", model="reranker", **ranking) == "NO_NODES"
        assert await reason_of("/v1/rerank", model="other", **ranking) == "UNKNOWN_MODEL"
        assert await reason_of("/v1/embeddings", model="other", input="a") == "UNKNOWN_MODEL"
        for node in (embedder, reranker):
            router.pipeline.table.join(node.address, node.card)
        router.pipeline.handle_nodes_changed()
        assert await reason_of("/v1/embeddings", model="embedder", input="a") == "none"
        assert await reason_of("/v1/rerank", model="reranker", **ranking) == "none"

    run(check, chat_text, byte_text)


def test_tokens_and_models_are_those_of_each_model(
    chat_text: ModelText, byte_text: ModelText
) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter, nodes: FakeNodeCalls) -> None:
        for model, text in (("chat", chat_text), ("embedder", byte_text), ("", chat_text)):
            ids = list(text.token_ids(TextPrompt("the quick")))
            tokens = await post(client, router, "/tokenize", model=model, prompt="the quick")
            assert tokens["tokens"] == ids
            back = await post(client, router, "/detokenize", model=model, tokens=ids)
            assert back == {"prompt": "the quick"}

        listed = {each.id: each.model_extra or {} for each in (await client.models.list()).data}
        assert {name: (each["tasks"], each["root"]) for name, each in listed.items()} == {
            "chat": (["generate"], "/models/chat"),
            "embedder": (["embed", "token_embed"], "/models/embedder"),
            "reranker": (["classify"], "/models/reranker"),
        }

    run(check, chat_text, byte_text)


def test_grpc_clients_name_the_model() -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST_S),
            a_router(table=a_table_of_three()) as (_, address),
            AsyncClient(address) as client,
        ):
            assert (await client.model()).name == "chat"
            embedder = await client.model("embedder")
            assert (embedder.name, embedder.tasks) == ("embedder", ("embed", "token_embed"))
            assert len(await client.embed([[3, 4]], model="embedder")) == 1
            for request in (
                client.model("other"),
                client.tokenize("a", model="other"),
                client.detokenize([3], model="other"),
            ):
                with pytest.raises(BatonError, match="served: chat, embedder, reranker"):
                    await request
            with pytest.raises(BatonError, match="--model embedder=FOLDER"):
                await client.tokenize("a", model="embedder")
            with pytest.raises(BatonError, match="set model to one of: embedder, reranker"):
                await client.embed([[3, 4]])

    asyncio.run(main())
