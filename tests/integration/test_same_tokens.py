"""One model disaggregated, colocated and in transformers: the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.client_load import ClientRequest, answer_all
from tests.support.models import prompt_of, reference_greedy

PROMPTS = [prompt_of(length, seed=80) for length in (1, 15, 16, 17, 64, 130, 300)]


def test_disaggregated_and_colocated_greedy_tokens_equal_those_of_transformers(
    cluster: LocalCluster, colocated: LocalCluster, model_folder: Path
) -> None:
    greedy = Generation(SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    requests = [ClientRequest(prompt, greedy) for prompt in PROMPTS]

    apart, together = answer_all(cluster.address, requests), answer_all(colocated.address, requests)

    expected = [reference_greedy(model_folder, prompt, 24) for prompt in PROMPTS]
    assert [list(one.token_ids) for one in apart] == expected
    assert [list(one.token_ids) for one in together] == expected
    for one in apart:
        assert one.finish.served.prompt_tokens_computed_on_decode == 0
    for one, prompt in zip(together, PROMPTS, strict=True):
        served = one.finish.served
        assert (served.prefill_node, served.kv_bytes) == ("", 0)
        assert served.prompt_tokens_computed_on_decode == len(prompt)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_disaggregated_greedy_tokens_on_a_gpu_equal_those_of_transformers(
    cluster_options: Callable[..., ClusterOptions], model_folder: Path, kernels: str
) -> None:
    options = cluster_options()
    arguments = (*options.node_arguments, "--device", "cuda", "--kernels", kernels)
    greedy = Generation(SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    requests = [ClientRequest(prompt, greedy) for prompt in PROMPTS]

    with LocalCluster(replace(options, node_arguments=arguments)) as cluster:
        answers = answer_all(cluster.address, requests)

    expected = [reference_greedy(model_folder, prompt, 24) for prompt in PROMPTS]
    assert [list(one.token_ids) for one in answers] == expected
    assert {one.finish.served.prompt_tokens_computed_on_decode for one in answers} == {0}


def test_disaggregated_and_colocated_seeded_tokens_are_the_same(
    cluster: LocalCluster, colocated: LocalCluster
) -> None:
    sampling = SamplingParams(
        max_tokens=24,
        temperature=0.9,
        top_p=0.9,
        presence_penalty=0.5,
        seed=12,
        logprobs=2,
        ignore_eos=True,
    )
    for prompt in ("the quick brown fox", prompt_of(70, seed=81)):
        with Client(cluster.address) as one, Client(colocated.address) as other:
            apart = one.generate(prompt, Generation(sampling))
            together = other.generate(prompt, Generation(sampling))

        assert (apart.token_ids, apart.text) == (together.token_ids, together.text)
        for mine, theirs in zip(apart.logprobs, together.logprobs, strict=True):
            assert mine.token_id == theirs.token_id
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_the_colocated_cluster_has_two_decode_nodes_and_no_prefill_node(
    colocated: LocalCluster,
) -> None:
    assert (len(colocated.prefills), len(colocated.decodes)) == (0, 2)
