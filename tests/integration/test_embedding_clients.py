"""Unmodified clients of embeddings and rerank against a real cluster.

LangChain's is installed for tests. The tests of others are skipped without them:
pip install llama-index-embeddings-openai-like cohere
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from baton.client import Client
from baton.cluster import LocalCluster

TEXTS = ["the quick", "brown fox jumps over", "the lazy dog"]


@pytest.fixture
def url(cluster: LocalCluster) -> str:
    return f"http://{cluster.router.http_address}"


@pytest.fixture
def http_client() -> Iterator[Any]:
    """Connect OpenAI's clients; they leave connections open that are their own."""
    with openai.DefaultHttpxClient() as connected:
        yield connected


def assert_equal(found: Any, expected: Any) -> None:
    assert np.shape(found) == np.shape(expected)
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


def test_langchain(url: str, http_client: Any, client: Client) -> None:
    module = pytest.importorskip("langchain_openai")
    embeddings = module.OpenAIEmbeddings(
        base_url=f"{url}/v1",
        api_key="none",
        model=client.model().name,
        check_embedding_ctx_length=False,
        http_client=http_client,
        max_retries=0,
    )

    assert_equal(embeddings.embed_documents(TEXTS), client.embed(TEXTS))
    assert_equal(embeddings.embed_query(TEXTS[1]), client.embed(TEXTS)[1])


def test_llama_index(url: str, http_client: Any, client: Client) -> None:
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    embeddings = module.OpenAILikeEmbedding(
        model_name=client.model().name,
        api_base=f"{url}/v1",
        api_key="none",
        http_client=http_client,
        max_retries=0,
    )

    assert_equal(embeddings.get_text_embedding_batch(TEXTS), client.embed(TEXTS))
    assert_equal(embeddings.get_query_embedding(TEXTS[0]), client.embed(TEXTS)[0])


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_cohere(url: str, client: Client, version: str) -> None:
    module = pytest.importorskip("cohere")
    query, *documents = client.embed([TEXTS[0], *TEXTS])
    cosines = np.array(documents) @ np.array(query)

    with getattr(module, version)(api_key="none", base_url=url) as reranker:
        found = reranker.rerank(model=client.model().name, query=TEXTS[0], documents=TEXTS, top_n=2)

    assert [each.index for each in found.results] == list(np.argsort(-cosines)[:2])
    assert_equal([each.relevance_score for each in found.results], np.sort(cosines)[:0:-1])
