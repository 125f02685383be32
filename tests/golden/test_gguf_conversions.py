"""Families whose tensors llama.cpp's converter changes: the answers of the folder it converts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from baton.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from baton.checkpoint.hub import open_checkpoint
from tests.golden.test_gguf_families import answer_of, logprobs_of
from tests.support.families import FAMILY_VARIANTS, STATE_VARIANTS
from tests.support.gguf_conversion import convert
from tests.support.models import make_model_folder
from tests.support.packed_folders import MXFP4, write_quantized

# What the metadata cannot express: scales of YaRN other than these, layers with linear attention
# or experts in another order, chunks and temperatures of Llama 4, RoPE besides Mamba2.
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0}
LATENT_YARN = {**YARN, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.7}
MINISTRAL_YARN = {
    **YARN,
    "original_max_position_embeddings": 32,
    "beta_fast": 1.0,
    "beta_slow": 0.25,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
LINEAR_LAYERS = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v3": {"rope_parameters": LATENT_YARN},
    "glm4-moe-lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "ministral3": {"rope_parameters": MINISTRAL_YARN},
    "qwen3-next": {**LINEAR_LAYERS, "mlp_only_layers": []},
    "qwen3.5": {"linear_value_head_dim": 32},  # so that its output matrix is quantized
    "qwen3.5-moe": LINEAR_LAYERS,
    "lfm2-moe": {"routed_scaling_factor": 1.0},  # that of the only published model
    "granite-4": {"shared_intermediate_size": 96},
    "granite-4-moe": {"position_embedding_type": "nope"},
    "qwen3-vl-moe": {"mlp_only_layers": []},
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "rope_parameters": LLAMA3},
}
VARIANTS = {
    name: replace(variant, settings={**variant.settings, **CHANGED.get(name, {})})
    for name, variant in {**FAMILY_VARIANTS, **STATE_VARIANTS}.items()
}
NAMES = (
    "gemma3n",
    "gpt-oss",
    "deepseek-v2-lite",
    "deepseek-v2",
    "deepseek-v3",
    "glm4-moe-lite",
    "kimi-linear",
    "glm4-moe",
    "ernie4.5-moe",
    "minimax-m2",
    "granite-moe",
    "granite-4",
    "granite-4-moe",
    "lfm2",
    "lfm2-moe",
    "nemotron-h",
    "nemotron-3",
    "ministral3",
    "mistral3",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
    "llama4",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
)


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_model_folder(tmp_path / "folder", VARIANTS[request.param])


# Matrices of Falcon-H1 are multiplied by its multipliers.
@pytest.mark.parametrize("folder", [*NAMES, "falcon-h1"], indirect=True)
def test_answers_are_those_of_the_folder(folder: Path) -> None:
    path = convert(folder, folder.with_suffix(".gguf"))

    found, expected = (answer_of(each, "float32") for each in (path, folder))

    assert found.token_ids == expected.token_ids
    assert logprobs_of(found) == pytest.approx(logprobs_of(expected), abs=1e-4)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_quantized_tensors_have_the_order_of_the_folder(folder: Path) -> None:
    path = convert(folder, folder.with_suffix(".gguf"), "Q8_0")

    with (
        GgufCheckpoint(path).open_tensors() as tensors,
        open_checkpoint(str(folder)).open_tensors() as of,
    ):
        shared = set(tensors.names()) & set(of.names())
        for name in tensors.names():
            tensor = tensors.tensor(name).float()
            if name in shared:
                assert (tensor - of.tensor(name).float()).abs().max() < 0.02, name
            quantized = tensors.quantized(name) if tensor.ndim == 2 else None
            if quantized is not None:
                assert torch.equal(torch.cat([each.dequantize() for each in quantized]), tensor)


# Parts that are joined, or rows and columns in another order.
@pytest.mark.parametrize(
    "folder",
    [
        "gemma3n",
        "deepseek-v3",
        "falcon-h1",
        "granite-moe",
        "granite-4-moe",
        "nemotron-3",
        "qwen3-next",
        "qwen3.5",
        "llama4",
    ],
    indirect=True,
)
def test_native_kernels_compute_quantized_tensors(folder: Path) -> None:
    path = convert(folder, folder.with_suffix(".gguf"), "Q8_0")

    found, expected = (logprobs_of(answer_of(path, dtype)) for dtype in ("bfloat16", "float32"))

    errors = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    assert statistics.median(errors) <= 0.1


@pytest.mark.parametrize("folder", ["gpt-oss"], indirect=True)
def test_mxfp4_experts_are_kept(folder: Path, tmp_path: Path) -> None:
    packed, _ = write_quantized(folder, tmp_path, MXFP4)
    path = convert(packed, tmp_path / "model.gguf")
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    with GgufCheckpoint(path).open_tensors() as tensors:
        for part in ("gate", "up", "down"):
            experts = stored[f"blk.1.ffn_{part}_exps.weight"]
            expected = gguf.quants.dequantize(experts.data, experts.tensor_type)
            for expert, numbers in enumerate(torch.tensor(expected)):
                name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
                [quantized] = tensors.quantized(name) or ()
                assert quantized.is_mxfp4
                assert torch.equal(quantized.dequantize(), numbers)

    for dtype in ("float32", "bfloat16"):
        found, expected_answer = (answer_of(each, dtype) for each in (path, packed))
        assert found.token_ids == expected_answer.token_ids
        assert logprobs_of(found) == logprobs_of(expected_answer)
