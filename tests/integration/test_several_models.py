"""A router with a chat model on two nodes and an embedder on a third, as real processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from openai import OpenAI

from baton.client import BatonError, Client, Generation
from baton.cluster import ClusterOptions, FurtherModel, LocalCluster
from baton.core.sampling import SamplingParams
from baton.core.vectors import Floats
from tests.integration.conftest import NODE_ARGUMENTS
from tests.support.models import VARIANTS, make_model_folder, prompt_of, reference
from tests.support.nodes import await_all_free

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TEXTS = [prompt_of(length, seed=400 + length) for length in (1, 17, 60)]
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "embedder"
    return make_model_folder(folder, VARIANTS["qwen2"], seed=11)


@pytest.fixture(scope="module")
def two_models(
    cluster_options: Callable[..., ClusterOptions], embedder: Path
) -> Iterator[LocalCluster]:
    options = replace(
        cluster_options(router_arguments=("--http-port", "0")),
        embedders=(FurtherModel(str(embedder)),),
        embedder_arguments=NODE_ARGUMENTS,
    )
    with LocalCluster(options) as running:
        yield running
    codes = {child.name: child.process.returncode for child in running.children}
    assert set(codes.values()) == {0}, codes


@pytest.fixture
def both(two_models: LocalCluster) -> Iterator[Client]:
    with Client(two_models.address, timeout_s=PATIENCE_S) as connected:
        yield connected


def expected(folder: Path, text: tuple[int, ...]) -> Floats:
    with torch.no_grad():
        states = reference(folder).model(torch.tensor([text])).last_hidden_state[0]
    return np.asarray(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())


def test_each_model_answers_as_it_does_alone(
    both: Client, client: Client, embedder: Path, two_models: LocalCluster
) -> None:
    prompts = [prompt_of(length, seed=500 + length) for length in (3, 40, 90)]
    answers = [client.generate(prompt, Generation(GREEDY)).token_ids for prompt in prompts]

    with ThreadPoolExecutor(4) as threads:
        embedding = [threads.submit(both.embed, TEXTS * 4, model="embedder") for _ in range(2)]
        generating = [
            threads.submit(both.generate, prompt, Generation(GREEDY, model="tiny"))
            for prompt in prompts
        ]

    generated = [each.result() for each in generating]
    assert [each.token_ids for each in generated] == answers
    assert {each.finish.served.prefill_node for each in generated if each.finish} == {"prefill-0"}
    for each in embedding:
        for text, vector in zip(TEXTS * 4, each.result(), strict=True):
            assert np.abs(np.array(vector) - expected(embedder, text)).max() < 1e-4
    for node in two_models.nodes:
        await_all_free(node.address)


def test_openai_clients_see_both_models(two_models: LocalCluster, embedder: Path) -> None:
    url = f"http://{two_models.router.http_address}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as api:
        listed = {each.id: each.model_extra or {} for each in api.models.list().data}
        assert {name: each["root"] for name, each in listed.items()} == {
            "tiny": two_models.router.arguments[two_models.router.arguments.index("--model") + 1],
            "embedder": str(embedder),
        }
        assert api.completions.create(model="tiny", prompt="the quick", max_tokens=2).choices
        found = api.embeddings.create(model="embedder", input="the quick")
        assert len(found.data[0].embedding) == len(expected(embedder, TEXTS[0]))
        with pytest.raises(openai.NotFoundError, match="served: embedder, tiny"):
            api.completions.create(model="other", prompt="the quick")


def test_requests_without_a_model(both: Client) -> None:
    assert both.model().name == "tiny"  # the embedder has no decode node
    assert both.generate(TEXTS[1], Generation(GREEDY)).token_ids
    with pytest.raises(BatonError, match="set model to one of: embedder, tiny"):
        both.embed(TEXTS)  # the nodes of both have --pooling
