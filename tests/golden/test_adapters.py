"""Tokens of LoRA adapters equal those of base models into which they are merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.core.errors import InvalidRequest
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.adapters import merge, write_adapter
from tests.support.models import VARIANTS, prompt_of, reference_choices
from tests.support.triton_parts import each_device, require_triton

FolderOf = Callable[[str], Path]
NUM_TOKENS = 16
FAMILIES = ("llama", "qwen3", "gemma3", "glm4", "olmo2", "qwen3-moe", "deepseek-v3", "qwen3-next")
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [prompt_of(length, seed=length) for length in (1, 17, 60)]
SOME = ("q_proj", "v_proj", "kv_b_proj")


@pytest.fixture(scope="session")
def folder_of(
    model_folder: Callable[[str], Path], family_folder: Callable[[str], Path]
) -> FolderOf:
    return lambda name: (model_folder if name in VARIANTS else family_folder)(name)


# Each prompt and each adapter once, of all pairs of them.
ALONE = (0, 4, 8)


def open_llm(folder: Path, **settings: Any) -> LLM:
    settings = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 24, **settings}
    return LLM(str(folder), show_progress=False, **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_equal_those_of_merged_weights(
    name: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    base = folder_of(name)
    first = write_adapter(base, tmp_path / "first", seed=1)
    second = write_adapter(base, tmp_path / "second", seed=2, rank=3, names=SOME, use_rslora=True)
    merged = [merge(base, each, tmp_path / f"merged-{each.name}") for each in (first, second)]
    names = ["", "first", "second"] * 3
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    with open_llm(base, lora={"first": str(first), "second": str(second)}) as llm:
        together = [each.token_ids for each in llm.generate(prompts, GREEDY, lora=names)]
        alone = {
            place: llm.generate(prompts[place], GREEDY, lora=names[place])[0].token_ids
            for place in ALONE
        }
        llm.engine.scheduler.check()

    folders = {"": base, "first": merged[0], "second": merged[1]}
    for prompt, each, answer in zip(prompts, names, together, strict=True):
        assert answer == reference_choices(folders[each], prompt, answer, NUM_TOKENS)
    assert alone == {place: together[place] for place in ALONE}
    assert len({tuple(answer) for answer in together}) > 2 * len(PROMPTS)


@each_device
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe", "deepseek-v3"])
def test_adapters_in_one_batch_have_the_same_tokens_with_triton_kernels_as_with_torch(
    name: str, device: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    """On a GPU, decode steps replay graphs."""
    require_triton()
    base = folder_of(name)
    first = write_adapter(base, tmp_path / "first", seed=1)
    second = write_adapter(base, tmp_path / "second", seed=2, rank=18, names=SOME)
    prompts, names = [PROMPTS[1][:size] for size in (1, 9, 17, 5)], ["", "first", "second", "first"]
    lora, greedy = {"first": str(first), "second": str(second)}, replace(GREEDY, max_tokens=4)
    found = []
    for kernels, place in (("triton", device), ("torch", "cpu")):
        with open_llm(base, kernels=kernels, device=place, lora=lora) as llm:
            answers = llm.generate(prompts, greedy, lora=names)
            plain = llm.generate(prompts, greedy)
        found.append([each.token_ids for each in answers])

    assert found[0] == found[1]
    assert [answer == each.token_ids for answer, each in zip(found[1], plain, strict=True)][1:] == [
        False
    ] * 3


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        *(("qwen3", quantize) for quantize in ("none", "int8", "int4")),
        ("qwen3-moe", "none"),
        ("qwen2-moe", "int8"),
        ("deepseek-v3", "none"),
        ("qwen3-next", "none"),
        ("granite-4-moe", "none"),
    ],
)
def test_native_kernels_give_a_request_the_same_tokens_in_any_batch(
    name: str, quantize: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    base = folder_of(name)
    adapters = {
        str(seed): str(write_adapter(base, tmp_path / str(seed), seed=seed)) for seed in range(3)
    }
    names = ["", *adapters] * 2
    prompts = [prompt_of(10 + index, seed=index) for index in range(len(names))]
    settings = {"dtype": "bfloat16", "quantize": quantize, "kernels": "native"}
    with open_llm(base, lora=adapters, **settings) as llm:
        together = [each.token_ids for each in llm.generate(prompts, GREEDY, lora=names)]
        alone = [
            llm.generate(prompt, GREEDY, lora=adapter)[0].token_ids
            for prompt, adapter in zip(prompts, names, strict=True)
        ]
    with open_llm(base, **settings) as llm:
        plain = [each.token_ids for each in llm.generate(prompts, GREEDY)]

    assert together == alone
    for adapter, answer, other in zip(names, together, plain, strict=True):
        assert (answer == other) is (not adapter)


def test_embeddings_equal_those_of_merged_weights(folder_of: FolderOf, tmp_path: Path) -> None:
    base = folder_of("qwen3")
    adapter = write_adapter(base, tmp_path / "first", seed=1)
    merged = merge(base, adapter, tmp_path / "merged")
    with open_llm(base, pooling="last", lora={"first": str(adapter)}) as llm:
        found = llm.embed(PROMPTS, lora="first")
        mixed = llm.embed(PROMPTS, lora=["", "first", ""])
        plain = llm.embed(PROMPTS)
    with open_llm(merged, pooling="last") as llm:
        expected = llm.embed(PROMPTS)

    np.testing.assert_allclose(found, expected, atol=1e-4)
    np.testing.assert_allclose(mixed, [plain[0], found[1], plain[2]], atol=1e-5)
    assert np.abs(np.subtract(found, plain)).max() > 1e-3


def test_as_many_adapters_as_prompts_are_named(folder_of: FolderOf) -> None:
    with (
        open_llm(folder_of("qwen3")) as llm,
        pytest.raises(InvalidRequest, match="2 adapters for 3 prompts"),
    ):
        llm.generate(PROMPTS, GREEDY, lora=["", ""])


def test_cached_prefixes_belong_to_an_adapter(folder_of: FolderOf, tmp_path: Path) -> None:
    base = folder_of("qwen3")
    folder = write_adapter(base, tmp_path / "first", seed=1)
    prompt = prompt_of(60)
    with open_llm(base, lora={"first": str(folder), "again": str(folder)}) as llm:
        stats = llm.engine.scheduler.stats
        llm.generate(prompt, GREEDY)
        llm.generate(prompt, GREEDY, lora="first")
        assert stats().total_prefix_hit_tokens == 0
        llm.generate(prompt, GREEDY, lora="again")  # the same weights under another name
        assert stats().total_prefix_hit_tokens > 0


def test_an_unknown_adapter_is_refused(folder_of: FolderOf) -> None:
    with (
        open_llm(folder_of("qwen3")) as llm,
        pytest.raises(InvalidRequest, match="there is no adapter 'other'"),
    ):
        llm.generate("a", GREEDY, lora="other")
