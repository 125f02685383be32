"""Model folders with random weights, of the shapes of published models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.checkpoint.weight_files import WeightFiles
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import RunnerConfig, load_runner
from baton.engine.runner.weights.decoder_weights import check_tensors
from benchmarks.engine.roofline import expect_experts
from benchmarks.engine.routing import RoutingMeter
from tests.support.models import prompt_of
from tests.support.random_folders import small_config, small_folder
from tests.support.runner_drivers import Driver, drives_of
from tools import make_model as tool
from tools.make_model import make_model, parse_args
from tools.model_shapes import SHAPES


def test_layers_and_experts_can_be_reduced() -> None:
    shape = SHAPES["qwen3-30b-a3b"]

    assert shape.scale()["num_hidden_layers"] == 4
    assert shape.scale(layers=48, experts=128) == shape.config
    assert SHAPES["mixtral-8x7b"].scale(experts=4)["num_local_experts"] == 4
    assert shape.describe() == "4 of 48 layers, 64 of 128 experts"
    assert SHAPES["granite-4.0-h-tiny"].scale(layers=6)["layer_types"] == ["mamba"] * 5 + [
        "attention"
    ]
    with pytest.raises(ValueError, match="has 8 experts"):
        shape.scale(experts=7)
    with pytest.raises(ValueError, match="no experts"):
        SHAPES["qwen3-0.6b"].scale(experts=8)


def test_counts_must_be_positive() -> None:
    assert parse_args(["--layers", "2", "out"]).layers == 2
    with pytest.raises(SystemExit):
        parse_args(["--layers", "0", "out"])


@pytest.mark.parametrize(
    ("name", "mean"), [("qwen3-30b-a3b", 1.0), ("gemma3-1b", 0.0), ("granite-4.0-h-tiny", 1.0)]
)
def test_norms_preserve_the_magnitude_of_their_input(
    name: str, mean: float, tmp_path: Path
) -> None:
    norms = [
        tensor
        for name, tensor in tensors_of(small_folder(tmp_path, name)).items()
        if name.endswith("norm.weight")
    ]

    assert len(norms) > 4
    assert all(abs(norm.mean() - mean) < 0.05 and norm.std() < 0.05 for norm in norms)


def test_gated_norms_of_linear_attention_are_near_one(tmp_path: Path) -> None:
    tensors = tensors_of(small_folder(tmp_path, "qwen3-next-80b-a3b"))

    gated = tensors["model.layers.0.linear_attn.norm.weight"]
    assert abs(gated.mean() - 1.0) < 0.05
    assert all(
        abs(tensor.mean()) < 0.05
        for name, tensor in tensors.items()
        if name.endswith("layernorm.weight")
    )


def test_the_tokens_of_a_prompt_spread_over_the_experts(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 32, "hidden_size": 256}
    folder = small_folder(tmp_path, "qwen3-30b-a3b", **sizes)
    meter = RoutingMeter(lambda _: 0.0)

    with load_runner(RunnerConfig(str(folder), block_size=16, kv_cache_bytes=1 << 20)) as runner:
        blocks = runner.kv_memory.num_blocks
        driver = Driver(runner, num_blocks=blocks, block_size=16, chunk=64)
        with meter.count():
            driver.run(*drives_of([prompt_of(32)], num_tokens=1))

    expected = expect_experts(read_model_config(SafetensorsFolder(folder)).moe)
    assert meter.num_experts(32) > 0.9 * expected(32)


def test_a_large_tensor_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, written = small_config("mixtral-8x7b"), []
    make_model(tmp_path / "whole", config)
    monkeypatch.setattr(tool, "PART_NUMBERS", 1 << 10)

    size = make_model(tmp_path / "parts", config, on_bytes=lambda *at: written.append(at))

    whole, parts = (tensors_of(tmp_path / name) for name in ("whole", "parts"))
    assert {name: tensor.shape for name, tensor in whole.items()} == {
        name: tensor.shape for name, tensor in parts.items()
    }
    assert size == (tmp_path / "parts" / "model.safetensors").stat().st_size
    assert len(written) > len(parts)
    assert written[-1][0] == size


def test_experts_of_gpt_oss_can_be_mxfp4(tmp_path: Path) -> None:
    make_model(tmp_path, small_config("gpt-oss-20b"), quantization="mxfp4")

    tensors = tensors_of(tmp_path)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    names = {name for name in tensors if name.startswith("model.layers.0.mlp.experts.")}
    assert {name.rpartition(".")[2] for name in names} == {
        "gate_up_proj_blocks",
        "gate_up_proj_scales",
        "gate_up_proj_bias",
        "down_proj_blocks",
        "down_proj_scales",
        "down_proj_bias",
    }
    blocks, scales = (tensors[f"model.layers.0.mlp.experts.gate_up_proj_{k}"] for k in PARTS)
    assert blocks.shape == (8, 2 * 96, 64 // 32, 16)
    assert scales.shape == (8, 2 * 96, 64 // 32)
    assert dequantized(blocks, scales).std() == pytest.approx(0.02, rel=0.3)
    with WeightFiles(tmp_path) as files:
        check_tensors(read_model_config(SafetensorsFolder(tmp_path)), files)


def test_no_other_model_has_mxfp4(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only gpt-oss"):
        make_model(tmp_path, small_config("mixtral-8x7b"), quantization="mxfp4")


PARTS = ("blocks", "scales")
FLOATS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def dequantized(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).long()
    numbers = FLOATS[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return numbers * torch.exp2(scales.float() - 127)[..., None]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
