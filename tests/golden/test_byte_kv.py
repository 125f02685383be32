"""Demo model and small families with a KV cache of bytes against one in the dtype of the model."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.runner.attention.paged_attention import TorchPagedAttention
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.kernels.choose import TORCH
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.model.mixers import AttentionPass
from baton.engine.runner.model.pass_layout import PassLayout
from baton.kv_transfer.layout import KvPacking
from baton.llm import LLM
from tests.support.kernels import kernels_by_variant
from tests.support.models import prompt_of
from tests.support.runner_drivers import Drive, Driver

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TEXTS = [inspect.getsource(module) for module in (inspect, textwrap)]
NUM_TEXT_TOKENS = 1000
PROMPTS = ["import os\n", "class Queue:\n    def __init__(self):\n        self.", "def main():\n"]
BUDGET = "16MiB"

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
each_dtype = pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
each_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("native", marks=needs_kernels)]
)


@cache
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


@pytest.mark.parametrize(("kv_cache_dtype", "share"), [("int8", 0.005), ("fp8", 0.01)])
@each_kernels
def test_the_perplexity_is_about_that_with_unquantized_kv(
    kernels: str, kv_cache_dtype: str, share: float
) -> None:
    found, wanted = losses(kernels, kv_cache_dtype), losses(kernels, "auto")

    assert len(found) == len(wanted) > 1900
    assert abs((found.mean() - wanted.mean()).exp() - 1) < share
    assert (found - wanted).abs().mean() < 0.05


@each_dtype
@each_kernels
def test_greedy_answers_start_like_those_with_unquantized_kv(
    kernels: str, kv_cache_dtype: str
) -> None:
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    answers = []
    for name in ("auto", kv_cache_dtype):
        with LLM(str(MODEL), kernels=kernels, kv_cache_memory=BUDGET, kv_cache_dtype=name) as llm:
            answers.append([answer.token_ids for answer in llm.generate(PROMPTS, sampling)])

    assert [each[:4] for each in answers[0]] == [each[:4] for each in answers[1]]


each_family = pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "gemma3n", "gemma4-k-eq-v", "gpt-oss", "deepseek-v3", "llama4"),
        *("qwen3-next", "granite-4-moe", "falcon-h1"),
    ],
)


@each_family
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


@dataclass(frozen=True, slots=True)
class RoundedPass:
    """Pass whose keys and values are rounded to FP8 before they are written in float32."""

    inner: AttentionPass

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        rounded = None if value is None else to_fp8_and_back(value)
        self.inner.write(layer, to_fp8_and_back(key), rounded)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        return self.inner.attend(layer, query)


class RoundedAttention(TorchPagedAttention):
    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        return RoundedPass(super().begin(layout, inputs))


def to_fp8_and_back(numbers: Tensor) -> Tensor:
    return numbers.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(numbers.dtype)


@each_family
def test_a_family_with_fp8_kv_computes_with_rounded_keys_and_values(
    family: str, family_folder: Callable[[str], Path]
) -> None:
    answers = []
    for kv_cache_dtype, attention in (("fp8", TorchPagedAttention), ("auto", RoundedAttention)):
        config = RunnerConfig(
            str(family_folder(family)),
            dtype="float32",
            kv_cache_bytes=4 << 20,
            kv_cache_dtype=kv_cache_dtype,
        )
        parts = replace(TORCH, make_attention=attention)
        sampling = SamplingParams(temperature=0.0, logprobs=1)
        drive = Drive(RequestId("r"), prompt_of(60), sampling, num_tokens=20)
        with load_runner(config, make_parts=lambda *_, parts=parts, **__: parts) as runner:
            num_blocks = min(200, runner.kv_memory.num_blocks)
            Driver(runner, num_blocks=num_blocks, block_size=16, chunk=24).run(drive)
        answers.append((drive.outputs, [one.logprob for one in drive.logprobs]))

    assert answers[0] == answers[1]
    assert len(answers[0][0]) == 20


def test_a_block_has_one_byte_per_number_and_with_int8_two_per_scale() -> None:
    sizes = []
    for kv_cache_dtype in ("auto", "int8", "fp8", "fp8_e4m3"):
        config = RunnerConfig(
            str(MODEL), kv_cache_bytes=1 << 20, kv_cache_dtype=kv_cache_dtype, kernels="torch"
        )
        with load_runner(config) as runner:
            sizes.append(runner.kv_memory)

    slots = 16 * 4 * 2 * 2  # tokens, layers, keys and values, heads
    fp8 = slots * 64
    assert [each.block_bytes for each in sizes] == [slots * 64 * 2, slots * (64 + 2), fp8, fp8]
    names = ["bfloat16", "int8/bfloat16", "fp8/bfloat16", "fp8/bfloat16"]
    assert [each.blocks.cache_dtype for each in sizes] == names
    assert {
        (each.blocks.head_dim, each.blocks.layer_bytes * 4 == each.block_bytes) for each in sizes
    } == {(64, True)}
    assert sizes[1].num_blocks == (1 << 20) // sizes[1].block_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e5m2", "int4"])
def test_an_unknown_dtype_is_refused(kv_cache_dtype: str) -> None:
    message = f"--kv-cache-dtype '{kv_cache_dtype}': choose one of auto, int8, fp8, fp8_e4m3"
    with pytest.raises(InvalidConfig, match=message):
        RunnerConfig(str(MODEL), kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("options", [{"kernels": "triton"}, {"device": "cuda"}], ids=str)
def test_fp8_kv_is_refused_on_a_gpu(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match="--kv-cache-dtype fp8 is for CPUs"):
        RunnerConfig(str(MODEL), kv_cache_dtype="fp8", **options)
