"""Families from GGUF files: the answers of the same numbers from a folder."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.completion import Completion
from baton.core.sampling import SamplingParams
from baton.llm import LLM
from tests.support.families import FAMILY_VARIANTS
from tests.support.gguf_files import Written, write_gguf
from tests.support.models import VARIANTS, make_model_folder, prompt_of

# llama.cpp has no models of these families with some layers without experts.
ALL_SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
ALL = {**VARIANTS, **FAMILY_VARIANTS}
TIED = {**ALL["gemma2"].settings, "tie_word_embeddings": True, "query_pre_attn_scalar": 32}
ALL["gemma2"] = replace(ALL["gemma2"], settings=TIED)  # as in all models of the family
SCALED = {**ALL["gemma3"].settings, "query_pre_attn_scalar": 32}
ALL["gemma3"] = replace(ALL["gemma3"], settings=SCALED)
ALL |= {
    name: replace(ALL[name], settings={**ALL[name].settings, **ALL_SPARSE})
    for name in ("qwen2-moe", "qwen3-moe")
}
NAMES = (
    "llama",
    "llama-tied-mqa",
    "llama-rope-llama3",
    "llama-rope-linear",
    "llama-rope-yarn",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2-moe",
    "qwen3",
    "qwen3-moe",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-k-eq-v",
    "gemma4-moe",
    "phi3",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "olmoe",
    "exaone4",
    "cohere",
    "cohere2",
    "ernie4.5",
    "hunyuan",
    "seed-oss",
    "glm",
    "glm4",
)
PROMPT = prompt_of(57, seed=3)
SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
Make = Callable[[str], tuple[Path, Written]]


@pytest.fixture(scope="module")
def written_of(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, tuple[Path, Written]] = {}

    def make(name: str) -> tuple[Path, Written]:
        if name not in made:
            folder = make_model_folder(tmp_path_factory.mktemp(name), ALL[name])
            made[name] = folder, write_gguf(folder, folder / "model.gguf", "Q8_0")
        return made[name]

    return make


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_the_numbers_that_were_written(name: str, written_of: Make) -> None:
    _, written = written_of(name)

    with GgufCheckpoint(written.path).open_tensors() as tensors:
        found = {each: tensors.tensor(each).float() for each in tensors.names()}

    assert found.keys() == written.tensors.keys()
    for each, tensor in written.tensors.items():
        assert torch.equal(found[each], tensor), each


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_a_folder_with_these_numbers(name: str, written_of: Make) -> None:
    folder, written = written_of(name)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(dict(written.tensors), folder / "model.safetensors")

    found, expected = (answer_of(each, "float32") for each in (written.path, folder))

    assert found.token_ids == expected.token_ids
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_native_kernels_compute_every_type(name: str, kind: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, ALL[name])
    path = write_gguf(folder, folder / "model.gguf", kind).path

    found, expected = (logprobs_of(answer_of(path, dtype)) for dtype in ("bfloat16", "float32"))

    errors = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    assert statistics.median(errors) <= 0.1


def answer_of(model: Path, dtype: str) -> Completion:
    with LLM(str(model), dtype=dtype, kv_cache_memory="4MiB", num_threads=1) as llm:
        [completion] = llm.generate([PROMPT], SAMPLING)
    return completion


def logprobs_of(answer: Completion) -> list[float]:
    """Return the logprobs of the prompt's tokens."""
    return [each.logprob for each in answer.prompt_logprobs if each is not None]
