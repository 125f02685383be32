"""Real cluster whose prefill and decode nodes have different KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.models import prompt_of

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.mark.parametrize(
    ("decode_arguments", "conversion"),
    [
        ((), "block_size 16 to 32"),
        (("--kv-cache-dtype", "int8"), "dtype float32 to int8/float32, block_size 16 to 32"),
    ],
    ids=["block_size", "int8"],
)
def test_answers_report_the_conversion_and_have_the_tokens_of_the_receiver(
    cluster_options: Callable[..., ClusterOptions],
    local: LLM,
    decode_arguments: tuple[str, ...],
    conversion: str,
) -> None:
    prompts = [prompt_of(length, seed=900 + length) for length in (300, 333)]
    options = replace(
        cluster_options(),
        decode_arguments=("--block-size", "32", "--kv-staging-memory", "1MiB", *decode_arguments),
    )
    with LocalCluster(options) as cluster, Client(cluster.address, timeout_s=60) as client:
        answers = [client.generate(prompt, Generation(SAMPLING)) for prompt in prompts * 2]

    summaries = [answer.finish.served for answer in answers if answer.finish is not None]
    for prompt, answer, served in zip(prompts * 2, answers, summaries, strict=True):
        assert served.kv_conversion == (conversion if served.is_prefill_remote else "")
        if not decode_arguments:
            assert answer.token_ids == local.generate(prompt, SAMPLING)[0].token_ids
    assert [served.is_prefill_remote for served in summaries[:2]] == [True, True]
    assert summaries[0].kv_blocks == 19
