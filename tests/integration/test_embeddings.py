"""Embeddings by the prefill node of a real cluster, beside answers, and by nodes of an encoder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import numpy as np
import pytest
import torch

from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.core.vectors import Floats
from baton.llm import LLM
from tests.support.baton_command import run_baton
from tests.support.encoders import make_encoder
from tests.support.models import prompt_of, reference
from tests.support.nodes import await_all_free, card_at

TEXTS = [prompt_of(length, seed=200 + length) for length in (1, 17, 100)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def expected(folder: Path, text: tuple[int, ...]) -> Floats:
    with torch.no_grad():
        states = reference(folder).model(torch.tensor([text])).last_hidden_state[0]
    return np.asarray(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())


def test_embeddings_equal_those_of_transformers(client: Client, model_folder: Path) -> None:
    found = client.embed(TEXTS)
    short = client.embed(TEXTS, dimensions=8)

    for text, vector, first in zip(TEXTS, found, short, strict=True):
        wanted = expected(model_folder, text)
        assert np.abs(np.array(vector) - wanted).max() < 1e-4
        assert np.abs(np.array(first) - wanted[:8] / np.linalg.norm(wanted[:8])).max() < 1e-4


def test_vectors_of_tokens_equal_those_of_transformers(
    client: Client, cluster: LocalCluster, model_folder: Path
) -> None:
    """As gRPC and HTTP return them, and the similarity that ColBERT computes of them."""
    found = client.embed_tokens(TEXTS)
    body = {"input": TEXTS, "task": "token_embed"}
    answer = httpx2.post(f"http://{cluster.router.http_address}/pooling", json=body, timeout=60)
    rows = [each["data"] for each in answer.raise_for_status().json()["data"]]

    for text, matrix, lists in zip(TEXTS, found, rows, strict=True):
        with torch.no_grad():
            states = reference(model_folder).model(torch.tensor([text])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(states, dim=-1).numpy()
        assert matrix.shape == wanted.shape
        assert np.abs(matrix - wanted).max() < 1e-4
        assert np.abs(np.array(lists) - matrix).max() < 1e-5
    query, *documents = found
    similarities = [float((query @ each.T).max(axis=1).sum()) for each in (*documents, query)]
    assert max(similarities) == pytest.approx(similarities[-1]) == pytest.approx(len(query))


def test_the_command_prints_vectors_of_tokens(cluster: LocalCluster, client: Client) -> None:
    run = run_baton("embed", "the quick", "--per-token", "--address", cluster.router.address)

    [matrix] = client.embed_tokens(["the quick"])
    assert np.abs(np.array(json.loads(run.stdout)) - matrix).max() < 1e-5


def test_embeddings_beside_answers(client: Client) -> None:
    prompts = [prompt_of(length, seed=300 + length) for length in (3, 40, 90)]
    answers = [client.generate(prompt, Generation(GREEDY)).token_ids for prompt in prompts]
    vectors = client.embed(TEXTS)
    with ThreadPoolExecutor(8) as threads:
        embedding = [threads.submit(client.embed, TEXTS * 8) for _ in range(3)]
        generating = [
            threads.submit(client.generate, prompt, Generation(GREEDY)) for prompt in prompts
        ]

    assert [each.result().token_ids for each in generating] == answers
    for each in embedding:
        assert np.abs(np.array(each.result()) - np.array(vectors * 8)).max() < 1e-5


def test_no_blocks_stay_allocated(client: Client, cluster: LocalCluster) -> None:
    client.embed(TEXTS)

    for node in (*cluster.prefills, *cluster.decodes):
        await_all_free(node.address)


def test_the_command_prints_a_vector_per_text(cluster: LocalCluster, client: Client) -> None:
    run = run_baton("embed", "the quick", "brown", "--address", cluster.router.address)

    vectors = [json.loads(line) for line in run.stdout.splitlines()]
    assert np.abs(np.array(vectors) - np.array(client.embed(["the quick", "brown"]))).max() < 1e-5


def test_errors_reach_the_client(client: Client) -> None:
    with pytest.raises(BatonError, match="embeddings have 64"):
        client.embed(["a"], dimensions=100)
    with pytest.raises(BatonError, match="truncate_prompt_tokens"):
        client.embed([prompt_of(600)])
    with pytest.raises(BatonError, match="embeddings have 64"):
        client.embed_tokens(["a"], dimensions=100)
    [cut] = client.embed([prompt_of(600)], truncate_prompt_tokens=100)
    assert np.allclose(cut, client.embed([prompt_of(600)[:100]])[0], atol=1e-6)


def test_nodes_of_an_encoder_have_no_kv_cache(tmp_path: Path) -> None:
    make_encoder(tmp_path, "bert")
    texts = ["the quick", "brown fox"]
    arguments = ("--threads", "1", "--pooling", "mean")
    options = ClusterOptions(str(tmp_path), 1, 1, node_arguments=arguments)

    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        found = client.embed(texts)
        cards = [card_at(node.address) for node in (*cluster.prefills, *cluster.decodes)]
        logs = [node.log for node in (*cluster.prefills, *cluster.decodes)]

    with LLM(str(tmp_path), pooling="mean", num_threads=1, show_progress=False) as llm:
        wanted = llm.embed(texts)
    assert np.abs(np.array(found) - np.array(wanted)).max() < 1e-5
    assert [(card.num_blocks, card.block_bytes, card.prefix_naming) for card in cards] == [
        (0, 0, None)
    ] * 2
    assert all("no KV cache" in log for log in logs)
