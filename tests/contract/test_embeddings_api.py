"""Embeddings, scores and reranking over HTTP and gRPC, with fake nodes and OpenAI's client."""

from __future__ import annotations

import asyncio
import base64
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from grpc import aio
from openai import AsyncOpenAI
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from baton.checkpoint.tokenizer_files import load_tokenizer
from baton.core.legs import LegKind
from baton.router.doors.openai.embeddings import MAX_SIMILARITIES
from baton.router.embeddings import MAX_IN_PIPELINE
from baton.router.input_processing.tokenization import ModelText, TextBoundary
from baton.router.routing.node_table import NodeTable
from baton.router.values import TextPrompt
from baton.rpc.errors import FailureKind, NodeFailed
from baton.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from tests.support.http_routers import HttpRouter, an_http_router
from tests.support.models import EOS_TOKEN_ID, save_tokenizer
from tests.support.node_calls import FakeNodeCalls, a_node, a_table, that_embeds, vector_of
from tests.support.routers import a_router

LONGEST_S = 60
SIZE = 4  # of the vectors of fake nodes
TEXTS = ["the quick", "brown fox jumps", "lazy"]
Body = dict[str, Any]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextBoundary:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS_TOKEN_ID}))
    return ModelText(load_tokenizer(folder))


def embedders(*roles: LegKind, size: int = SIZE, **card: Any) -> NodeTable:
    nodes = [a_node(role) for role in roles or (LegKind.PREFILL,)]
    return a_table(*(that_embeds(node, vector_size=size, **card) for node in nodes))


ONLY_EMBEDDER = {"generates": False}


def run(
    check: Callable[[AsyncOpenAI, HttpRouter], Awaitable[None]],
    text: TextBoundary | None = None,
    *,
    nodes: FakeNodeCalls | None = None,
    table: NodeTable | None = None,
    embed_truncate: bool = True,
) -> None:
    table = table or embedders(**ONLY_EMBEDDER)

    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST_S),
            an_http_router(nodes, table=table, text=text, embed_truncate=embed_truncate) as router,
            AsyncOpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0) as client,
        ):
            await check(client, router)

    asyncio.run(main())


async def post(client: AsyncOpenAI, router: HttpRouter, path: str, body: Body) -> Any:
    response = await client._client.post(router.url + path, json=body)
    return response.raise_for_status().json()


async def error_of(
    client: AsyncOpenAI, router: HttpRouter, path: str, body: Body
) -> tuple[int, str]:
    response = await client._client.post(router.url + path, json=body)
    return response.status_code, response.json()["error"]["message"]


def vectors_of(text: TextBoundary) -> list[Any]:
    return [vector_of(text.token_ids(TextPrompt(each))) for each in TEXTS]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openai_client_gets_embeddings_in_order(text: TextBoundary, encoding: Any) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        found = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format=encoding)
        vectors = [_decoded(each.embedding) for each in found.data]
        assert np.allclose(vectors, vectors_of(text))
        assert [each.index for each in found.data] == [0, 1, 2]
        assert found.model == "tiny"
        assert found.usage.prompt_tokens == found.usage.total_tokens > len(TEXTS)

    run(check, text)


def _decoded(embedding: Any) -> Any:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding), "<f4")
    return np.array(embedding, np.float32)


def test_token_ids_and_dimensions() -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        one = await client.embeddings.create(model="tiny", input=[3, 4, 5])
        two = await client.embeddings.create(model="tiny", input=[[3, 4, 5], [6]], dimensions=2)
        whole = vector_of([3, 4, 5])
        assert np.allclose(one.data[0].embedding, whole)
        assert np.allclose(two.data[0].embedding, whole[:2] / np.linalg.norm(whole[:2]))
        with pytest.raises(openai.BadRequestError, match="embeddings have 4"):
            await client.embeddings.create(model="tiny", input=[3], dimensions=5)

    run(check)


@pytest.mark.parametrize(
    ("roles", "chosen"),
    [
        ((LegKind.PREFILL,), LegKind.PREFILL),
        ((LegKind.DECODE,), LegKind.DECODE),
        ((LegKind.PREFILL, LegKind.DECODE), LegKind.PREFILL),
    ],
)
def test_prefill_nodes_embed_and_decode_nodes_without_them(
    roles: tuple[LegKind, ...], chosen: LegKind
) -> None:
    nodes = FakeNodeCalls()

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        await client.embeddings.create(model="tiny", input=[3, 4])

    run(check, nodes=nodes, table=embedders(*roles))
    [received] = nodes.received
    assert received.leg is LegKind.ENCODE
    assert received.node == chosen.value
    assert received.request.task.is_pooling
    assert received.request.send_to is None
    assert received.request.receive_from is None


def test_a_node_that_fails_is_replaced() -> None:
    nodes = FakeNodeCalls(prefill_faults=[NodeFailed("gone", kind=FailureKind.VANISHED)])

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        found = await client.embeddings.create(model="tiny", input=[3, 4])
        assert np.allclose(found.data[0].embedding, vector_of([3, 4]))

    two = [a_node(LegKind.PREFILL, name) for name in ("one", "two")]
    table = a_table(*(that_embeds(node, vector_size=SIZE, generates=False) for node in two))
    run(check, nodes=nodes, table=table)
    assert [received.node for received in nodes.received] in (["one", "two"], ["two", "one"])


def test_scores_of_an_embedder_are_cosines(text: TextBoundary) -> None:
    one, two, three = vectors_of(text)

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        for path in ("/v1/score", "/score"):
            body = {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1:]}
            found = await post(client, router, path, body)
            assert np.allclose([each["score"] for each in found["data"]], [one @ two, one @ three])

    run(check, text)


def test_reranking_orders_documents(text: TextBoundary) -> None:
    one, two, three = vectors_of(text)
    scores = [float(one @ two), float(one @ three), 1.0]

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        documents: list[Any] = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[0]]
        body: Body = {"model": "tiny", "query": TEXTS[0], "documents": documents}
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            results = (await post(client, router, path, body))["results"]
            order = sorted(range(3), key=lambda index: -scores[index])
            assert [each["index"] for each in results] == order
            assert results[0]["document"] == {"text": TEXTS[0]}
            relevances = [each["relevance_score"] for each in results]
            assert np.allclose(relevances, sorted(scores, reverse=True))
        body = {**body, "top_n": 1, "return_documents": False}
        short = await post(client, router, "/rerank", body)
        assert [set(each) for each in short["results"]] == [{"index", "relevance_score"}]

    run(check, text)


def test_classifiers_score_pairs_together(text: TextBoundary) -> None:
    nodes = FakeNodeCalls()

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
        assert len((await post(client, router, "/v1/score", body))["data"]) == 2

    run(check, text, nodes=nodes, table=embedders(size=1, has_labels=True, generates=False))
    assert len(nodes.received) == 2


def by_token(token_ids: Any) -> Any:
    """Return the vectors of the tokens of a text."""
    return np.stack([vector_of([token_id]) for token_id in token_ids])


def test_pooling_returns_a_vector_of_each_token(text: TextBoundary) -> None:
    nodes = FakeNodeCalls()

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        token_ids = [text.token_ids(TextPrompt(each)) for each in TEXTS]
        for task in ({"task": "token_embed"}, {}):
            found = await post(client, router, "/pooling", {"input": TEXTS, **task})
            for index, each in enumerate(found["data"]):
                assert (each["object"], each["index"]) == ("pooling", index)
                assert np.allclose(each["data"], by_token(token_ids[index]))
            assert found["id"].startswith("pool-")
            assert found["usage"]["prompt_tokens"] == sum(map(len, token_ids))
        body = {"input": [3, 4, 5], "encoding_format": "base64", "dimensions": 2}
        [short] = (await post(client, router, "/pooling", body))["data"]
        wanted = by_token([3, 4, 5])[:, :2]
        wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
        assert np.allclose(_decoded(short["data"]).reshape(3, 2), wanted)
        [pooled] = (await post(client, router, "/pooling", {"input": [3], "task": "embed"}))["data"]
        assert np.allclose(pooled["data"], vector_of([3]))

    run(check, text, nodes=nodes)


def test_models_with_vectors_of_tokens_alone_score_by_max_sim(text: TextBoundary) -> None:
    query, *documents = (by_token(text.token_ids(TextPrompt(each))) for each in TEXTS)
    wanted = [max_sim(query, each) for each in documents]

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        body: Body = {"text_1": TEXTS[0], "text_2": TEXTS[1:]}
        found = await post(client, router, "/v1/score", body)
        assert [each["score"] for each in found["data"]] == pytest.approx(wanted)
        both = await post(client, router, "/v1/score", {"text_1": TEXTS, "text_2": TEXTS})
        assert both["data"][0]["score"] == pytest.approx(max_sim(query, query))
        body = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
        [best] = (await post(client, router, "/v1/rerank", body))["results"]
        assert best["relevance_score"] == pytest.approx(max(wanted))
        listed = await client.models.list()
        assert listed.data[0].model_dump()["tasks"] == ["token_embed"]

    run(check, text, table=embedders(pools_tokens=True, generates=False))


def test_max_sim_of_long_texts_needs_little_memory(text: TextBoundary) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 600
    table = embedders(pools_tokens=True, generates=False, max_model_len=1 << 14)
    vectors = by_token(text.token_ids(TextPrompt(words)))
    wanted = max_sim(vectors, vectors[:100])  # all of its different tokens
    num_bytes = 4 * len(vectors) ** 2
    assert num_bytes > 16 * MAX_SIMILARITIES

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        body = {"text_1": words, "text_2": words}
        tracemalloc.start()
        try:
            [found] = (await post(client, router, "/v1/score", body))["data"]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert found["score"] == pytest.approx(wanted)
        assert peak < num_bytes

    run(check, text, table=table)


def max_sim(query: Any, document: Any) -> float:
    return sum(max(float(own @ other) for other in document) for own in query)


def test_pooling_of_classifiers() -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        for body in ({"input": [3]}, {"input": [3], "task": "classify"}):
            [scores] = (await post(client, router, "/pooling", body))["data"]
            assert np.allclose(scores["data"], vector_of([3]))
        body = {"input": [3], "task": "token_embed"}
        status, message = await error_of(client, router, "/pooling", body)
        assert (status, "it must be classify" in message) == (400, True)

    run(check, table=embedders(has_labels=True, generates=False))


def test_too_many_vectors_of_tokens_are_refused_before_they_are_computed() -> None:
    nodes = FakeNodeCalls()

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        body = {"input": [3] * 9}
        status, message = await error_of(client, router, "/pooling", body)
        assert (status, "32 MiB, 8 tokens" in message) == (400, True)
        assert "truncate_prompt_tokens" in message
        assert not nodes.received
        body["truncate_prompt_tokens"] = 8  # type: ignore[assignment]
        assert await post(client, router, "/pooling", body)

    run(check, nodes=nodes, table=embedders(size=1 << 20, generates=False))


def test_vectors_of_all_texts_of_a_request_have_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.router.input_processing.limits.MAX_VECTORS_BYTES", 4 * SIZE * 10)

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        assert await post(client, router, "/pooling", {"input": [[3] * 5, [3] * 5]})
        body = {"input": [[3] * 5, [3] * 6]}
        status, message = await error_of(client, router, "/pooling", body)
        assert (status, "11 tokens have a vector of 4 numbers" in message) == (400, True)

    run(check)


def test_vectors_of_tokens_count_in_the_budget_of_bytes() -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        with router.pipeline.byte_budget.lease() as others:
            others.grow_to(router.pipeline.byte_budget.max_bytes - 100)
            status, message = await error_of(client, router, "/pooling", {"input": [3] * 5})
            assert (status, "send this one later" in message) == (429, True)
        assert router.pipeline.byte_budget.num_held == 0
        assert await post(client, router, "/pooling", {"input": [3] * 5})

    run(check)


ERRORS: list[tuple[str, Body, str]] = [
    ("/pooling", {"input": "a", "task": "token_classify"}, "task"),
    ("/pooling", {"input": "a", "task": "classify"}, "it must be embed or token_embed"),
    ("/pooling", {"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ("/pooling", {"messages": []}, "input"),
    ("/pooling", {"input": "a", "dimensions": 5}, "embeddings have 4"),
    ("/v1/embeddings", {"input": []}, "input is an empty list"),
    ("/v1/embeddings", {"input": ["a"] * 2049}, "at most 2048"),
    ("/v1/embeddings", {"input": {"a": 1}}, "input must be a text"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "at least 1"),
    ("/v1/embeddings", {"input": "a", "colour": 1}, "colour is not a known field"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, "'other' is not served here"),
    ("/v1/embeddings", {"input": ""}, "no tokens"),
    ("/v1/embeddings", {"input": list(range(3, 99)) * 6}, "the text has 576 tokens"),
    ("/v1/embeddings", {"input": ["a"] * 10_000}, "at most 2048"),
    ("/v1/embeddings", {"input": [[3]] * 10_000}, "at most 2048"),
    ("/v1/embeddings", {"input": ["a", ""]}, "no tokens"),
    ("/v1/embeddings", {"input": [[]]}, "a text has no tokens"),
    ("/v1/embeddings", {"input": "a" * 1_000_000}, "tokens"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1 << 40}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1 << 70}, "dimensions"),
    ("/v1/embeddings", {"input": "a", "dimensions": 1.5}, "dimensions"),
    ("/v1/rerank", {"query": "a", "documents": ["a"] * 10_000}, "at most 2048"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 texts"),
    ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("/v1/rerank", {"query": "a", "documents": [{"body": "b"}]}, "documents must be texts"),
    ("/v1/completions", {"prompt": [3, 4]}, "generates no text"),
]


def test_errors_name_the_field_and_the_remedy(text: TextBoundary) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        for path, body, expected in ERRORS:
            status, message = await error_of(client, router, path, body)
            assert (400 <= status < 500, expected in message) == (True, True), (path, message)

    run(check, text, embed_truncate=False)


@pytest.mark.parametrize("written", ["NaN", "Infinity", "1e999", "null null"])
def test_bodies_that_are_not_json_are_refused(text: TextBoundary, written: str) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        body = f'{{"input": "a", "dimensions": {written}}}'
        response = await client._client.post(
            f"{router.url}/v1/embeddings",
            content=body,
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["reason"]

    run(check, text)


def test_a_model_that_does_not_embed() -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        with pytest.raises(openai.BadRequestError, match="--pooling"):
            await client.embeddings.create(model="tiny", input=[3])

    run(check, table=a_table())


def test_long_texts_are_cut_on_request() -> None:
    nodes = FakeNodeCalls()

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        for limit, num_tokens in ((5, 5), (-1, 512), (1000, None)):
            body = {"input": [3] * 600, "truncate_prompt_tokens": limit}
            if num_tokens is None:
                assert (await error_of(client, router, "/v1/embeddings", body))[0] == 400
            else:
                found = await post(client, router, "/v1/embeddings", body)
                assert found["usage"]["prompt_tokens"] == num_tokens

    run(check, nodes=nodes)


def test_texts_that_exceed_an_encoder_are_cut_with_a_warning() -> None:
    """As sentence-transformers does. A text that exactly fits is whole."""

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        for lens, is_cut in (((600, 5), True), ((512, 5), False)):
            texts = [[3] * length for length in lens]
            found = await post(client, router, "/v1/embeddings", {"input": texts})
            assert found["usage"]["prompt_tokens"] == 517
            [*warnings] = found.get("warnings", [])
            assert [("512 tokens" in each) for each in warnings] == [True] * is_cut
        body = {"input": [3] * 600, "truncate_prompt_tokens": 512}
        assert "warnings" not in await post(client, router, "/v1/embeddings", body)

    run(check)


@pytest.mark.parametrize(
    ("table", "embed_truncate"), [(embedders(**ONLY_EMBEDDER), False), (embedders(), True)]
)
def test_long_texts_of_generating_models_and_without_the_option_are_refused(
    table: NodeTable, embed_truncate: bool
) -> None:
    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        status, message = await error_of(client, router, "/v1/embeddings", {"input": [3] * 600})
        assert (status, "set truncate_prompt_tokens" in message) == (400, True)

    run(check, table=table, embed_truncate=embed_truncate)


def test_token_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    """An encoder's own tokenizer puts special tokens around a text."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    text = ModelText(load_tokenizer(tmp_path))

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        own = list(text.token_ids(TextPrompt("the quick")))
        assert await post(client, router, "/v1/embeddings", {"input": [own]})

        status, message = await error_of(client, router, "/v1/embeddings", {"input": own[1:]})

        assert status == 400
        assert "another tokenizer" in message
        assert "check_embedding_ctx_length=False" in message

    run(check, text)
    own_ids_only = embedders()  # a model that generates: its prompts may begin with any token

    async def check_generating(client: AsyncOpenAI, router: HttpRouter) -> None:
        assert await post(client, router, "/v1/embeddings", {"input": [7, 8]})

    run(check_generating, text, table=own_ids_only)


def test_a_large_request_leaves_places_for_others() -> None:
    """Of 300 texts, only some are in the pipeline at once."""
    nodes, most = FakeNodeCalls(), 0

    async def check(client: AsyncOpenAI, router: HttpRouter) -> None:
        nonlocal most
        queue, texts = router.pipeline.traffic, [[3, 4]] * 300
        large = asyncio.ensure_future(client.embeddings.create(model="tiny", input=texts))
        while not large.done():
            most = max(most, queue.num_in_flight + queue.num_waiting)
            await asyncio.sleep(0)
        assert len((await large).data) == 300

    run(check, nodes=nodes)
    assert 1 < most <= MAX_IN_PIPELINE


@pytest.mark.parametrize(("model", "code"), [("", "UNAVAILABLE"), ("other", "NOT_FOUND")])
def test_grpc_checks_dimensions_once_the_model_is_known(model: str, code: str) -> None:
    table = NodeTable() if not model else embedders(**ONLY_EMBEDDER)

    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST_S),
            a_router(table=table) as (_, address),
            aio.insecure_channel(address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            inputs = [inference_pb2.EmbedInput(token_ids=sampling_pb2.TokenIds(ids=[3]))]
            request = inference_pb2.EmbedRequest(inputs=inputs, dimensions=3, model=model)
            with pytest.raises(aio.AioRpcError) as failed:
                await stub.Embed(request)
            assert failed.value.code().name == code, failed.value.details()

    asyncio.run(main())


def test_grpc() -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(LONGEST_S),
            a_router(table=embedders(**ONLY_EMBEDDER)) as (_, address),
            aio.insecure_channel(address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            inputs = [
                inference_pb2.EmbedInput(token_ids=sampling_pb2.TokenIds(ids=ids))
                for ids in ([3, 4, 5], [6])
            ]
            found = await stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, dimensions=3))
            first = vector_of([3, 4, 5])[:3]
            assert np.allclose(found.embeddings[0].values, first / np.linalg.norm(first))
            assert [each.prompt_tokens for each in found.embeddings] == [3, 1]
            assert found.model == "tiny"
            found = await stub.Embed(inference_pb2.EmbedRequest(inputs=inputs, per_token=True))
            vectors = np.frombuffer(found.embeddings[0].token_vectors, "<f4")
            assert np.allclose(vectors.reshape(3, SIZE), by_token([3, 4, 5]))
            assert not found.embeddings[0].values
            for request, reason in (
                (inference_pb2.EmbedRequest(), "input is empty"),
                (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "set one of"),
                (inference_pb2.EmbedRequest(inputs=inputs, dimensions=9), "embeddings have 4"),
                (inference_pb2.EmbedRequest(inputs=inputs, model="other"), "not served"),
            ):
                with pytest.raises(aio.AioRpcError, match=reason):
                    await stub.Embed(request)

    asyncio.run(main())
