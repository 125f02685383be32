"""Families that differ most from Llama, each in a cluster of processes whose decode node dies.

The golden tests compare every family with transformers, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import Client, Generation
from baton.cluster import ClusterOptions, LocalCluster
from baton.core.sampling import SamplingParams
from tests.support.families import FAMILY_VARIANTS, STATE_VARIANTS
from tests.support.models import make_model_folder, prompt_of, reference_logprobs
from tests.support.nodes import kill_the_writer
from tests.support.suspended_processes import suspended
from tests.support.unknown_architectures import UNKNOWN

# Soft caps with windows, windows, sinks, shared experts with sigmoid routing, chunks, softmax
# routing, latent attention, recurrent states, layers without MLPs, and modules of transformers.
VARIANTS = {**FAMILY_VARIANTS, **STATE_VARIANTS, **UNKNOWN}
FAMILIES = (
    *("gemma2", "gemma3", "gpt-oss", "glm4-moe", "llama4", "qwen3-moe", "deepseek-v3"),
    *("qwen3-next", "qwen3.5", "qwen3.5-moe", "granite-4-moe", "falcon-h1", "olmo-hybrid"),
    "kimi-linear",
    *("lfm2", "nemotron-3", "starcoder2"),
)
PROMPT = prompt_of(70)  # longer than windows and chunks
NUM_WHOLE, NUM_MOVED = 12, 25  # answers that end in the next block, and in the one after it
NUM_SHARED = 64  # all whole blocks, at whose end a recurrent state has a snapshot
BRANCHED = (*PROMPT[:NUM_SHARED], *prompt_of(9, seed=5))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_hand_offs_prefix_hits_and_a_dead_decode_node_change_no_token_of_a_family(
    name: str, cluster_options: Callable[..., ClusterOptions], tmp_path: Path
) -> None:
    folder = make_model_folder(tmp_path, VARIANTS[name])
    options = replace(cluster_options(num_decode=2), model=str(folder))
    with LocalCluster(options) as cluster, Client(cluster.address) as client:
        whole = client.generate(PROMPT, greedy(NUM_WHOLE))
        with suspended(*cluster.decodes):  # or the answer may be whole before that
            stream = client.stream(BRANCHED, greedy(NUM_MOVED))
            chunks = [next(stream)]  # sampled on prefill
            killed = kill_the_writer(cluster)
        chunks += stream

    assert whole.finish is not None
    assert whole.finish.served.is_prefill_remote
    assert whole.finish.served.kv_bytes
    assert_greedy(folder, PROMPT, whole.token_ids)
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.served.is_prefill_remote
    assert finish.num_cached_prompt_tokens == NUM_SHARED
    assert finish.served.attempts == 2
    assert finish.served.decode_node != killed.name
    tokens = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len(tokens) == NUM_MOVED
    assert_greedy(folder, BRANCHED, tokens)


def greedy(max_tokens: int) -> Generation:
    return Generation(SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def assert_greedy(folder: Path, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """Check that transformers chooses each of these tokens, given those before it."""
    logprobs = reference_logprobs(folder, [*prompt, *tokens])
    assert logprobs[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == list(tokens)
