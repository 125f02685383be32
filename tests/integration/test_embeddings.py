"""Embeddings by the prefill node of a real cluster, beside answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.client import BatonError, Client, Generation
from baton.cluster import LocalCluster
from baton.core.sampling import SamplingParams
from baton.core.vectors import Floats
from tests.support.baton_command import run_baton
from tests.support.models import prompt_of, reference
from tests.support.nodes import await_all_free

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
    [cut] = client.embed([prompt_of(600)], truncate_prompt_tokens=100)
    assert np.allclose(cut, client.embed([prompt_of(600)[:100]])[0], atol=1e-6)
