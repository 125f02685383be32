"""Demo model and small families with a KV cache of int8 against one in the dtype of the model."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.kv_transfer.layout import KvPacking
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant
from tests.support.models import prompt_of

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXTS = [inspect.getsource(module) for module in (inspect, textwrap)]
NUM_TEXT_TOKENS = 1000
PROMPTS = ["import os\n", "class Queue:\n    def __init__(self):\n        self.", "def main():\n"]
BUDGET = "16MiB"

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
each_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("native", marks=needs_kernels)]
)


def losses(kernels: str, kv_cache_dtype: str) -> Tensor:
    """Return the surprise of each token of the texts, given those before it."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(
        str(MODEL), kernels=kernels, kv_cache_memory=BUDGET, kv_cache_dtype=kv_cache_dtype
    ) as llm:
        prompts = [llm.tokenizer.encode(text)[:NUM_TEXT_TOKENS] for text in TEXTS]
        answers = llm.generate(prompts, sampling)
    found = [-one.logprob for answer in answers for one in answer.prompt_logprobs or () if one]
    return torch.tensor(found)


@each_kernels
def test_the_perplexity_is_within_half_a_percent_of_unquantized_kv(kernels: str) -> None:
    found, wanted = losses(kernels, "int8"), losses(kernels, "auto")

    assert len(found) == len(wanted) > 1900
    assert abs((found.mean() - wanted.mean()).exp() - 1) < 0.005
    assert (found - wanted).abs().mean() < 0.05


@each_kernels
def test_greedy_answers_start_like_those_with_unquantized_kv(kernels: str) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    answers = []
    for kv_cache_dtype in ("auto", "int8"):
        with LLM(
            str(MODEL), kernels=kernels, kv_cache_memory=BUDGET, kv_cache_dtype=kv_cache_dtype
        ) as llm:
            answers.append([answer.token_ids for answer in llm.generate(PROMPTS, sampling)])

    assert [each[:4] for each in answers[0]] == [each[:4] for each in answers[1]]


@pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "gemma4-k-eq-v", "gpt-oss", "deepseek-v3", "llama4"),
        *("qwen3-next", "granite-4-moe", "falcon-h1"),
    ],
)
def test_a_family_with_int8_kv_finds_a_prompt_about_as_likely(
    family: str, family_folder: Callable[[str], Path]
) -> None:
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    found = []
    for kv_cache_dtype in ("auto", "int8"):
        folder = str(family_folder(family))
        with LLM(folder, kv_cache_memory=BUDGET, kv_cache_dtype=kv_cache_dtype) as llm:
            [answer] = llm.generate(prompt_of(60), sampling)
            assert llm.kv_memory is not None
            assert (llm.kv_memory.blocks.packing is KvPacking.INT8) == (kv_cache_dtype == "int8")
        found.append(torch.tensor([one.logprob for one in answer.prompt_logprobs or () if one]))

    assert (found[0] - found[1]).abs().median() < 0.05


def test_an_int8_block_has_one_byte_per_number_and_two_per_scale() -> None:
    sizes = []
    for kv_cache_dtype in ("auto", "int8"):
        config = RunnerConfig(
            str(MODEL), kv_cache_bytes=1 << 20, kv_cache_dtype=kv_cache_dtype, kernels="torch"
        )
        with load_runner(config) as runner:
            sizes.append(runner.kv_memory)

    slots = 16 * 4 * 2 * 2  # tokens, layers, keys and values, heads
    assert [each.block_bytes for each in sizes] == [slots * 64 * 2, slots * (64 + 2)]
    assert [each.blocks.cache_dtype for each in sizes] == ["bfloat16", "int8/bfloat16"]
    assert {(each.blocks.head_dim, each.layer_bytes * 4 == each.block_bytes) for each in sizes} == {
        (64, True)
    }
    assert sizes[1].num_blocks == (1 << 20) // sizes[1].block_bytes


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="--kv-cache-dtype 'fp8': choose one of auto, int8"):
        RunnerConfig(str(MODEL), kv_cache_dtype="fp8")
