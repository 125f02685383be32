"""Adapter folders that do not fit, are not supported or are damaged: named errors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.checkpoint.peft_config import CONFIG, PeftAdapterConfig
from baton.checkpoint.peft_folder import WEIGHTS, PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import TORCH_LOW_RANK, ActiveAdapters
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.families.read_config import read_model_config
from tests.support.adapters import write_adapter
from tests.support.families import FAMILY_VARIANTS
from tests.support.models import VARIANTS, make_model_folder

Change = Callable[[dict[str, torch.Tensor]], None]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("base"), VARIANTS["llama"])


def load(base: Path, adapter: Path, max_rank: int = 16) -> int:
    places = AdapterPlaces(read_model_config(SafetensorsFolder(base)))
    return len(list(places.parts(PeftFolder(adapter, places.limits(max_rank)), max_rank)))


def test_a_good_adapter(base: Path, tmp_path: Path) -> None:
    assert load(base, write_adapter(base, tmp_path)) == 2 * 7


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"kasa_config": {}}, "kasa_config"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"r": 0}, "r"),
        ({"r": 5}, "rank 5"),
        ({"r": "4"}, "r"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": -1}}, "alpha_pattern"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "alpha_pattern"),
        ({"rank_pattern": {"q_proj": math.inf}}, "rank_pattern"),
        # Patterns whose match would take for ever, by repetitions, alternatives or their number.
        ({"rank_pattern": {"(.*.*)*x": 4}}, "match fast"),
        ({"rank_pattern": {"(?#[)(.*)*x(?#])": 4}}, "match fast"),
        ({"rank_pattern": {".*.*.*.*.*x": 4}}, "match fast"),
        ({"rank_pattern": {"(a|a)" * 30: 4}}, "match fast"),
        ({"rank_pattern": {"a?" * 30: 4}}, "match fast"),
        ({"alpha_pattern": {"x" * 300: 4}}, "match fast"),
        ({"alpha_pattern": {f"x{number}": 4 for number in range(5000)}}, "match fast"),
        ({"x": "x" * (1 << 20)}, "more than 1048576 bytes"),
        ({"rank_pattern": {"q_proj": 2}}, "rank 2"),
    ],
)
def test_settings(base: Path, tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    adapter = write_adapter(base, tmp_path, rank=4)
    path = adapter / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))

    with pytest.raises(ModelError, match=expected):
        load(base, adapter)


def _renamed(name: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors.pop(FIRST)

    return change


def _replaced(tensor: torch.Tensor) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST] = tensor

    return change


def _repeat_first(tensors: dict[str, torch.Tensor]) -> None:
    for name in (FIRST, FIRST.replace("lora_A", "lora_B")):
        tensors[name.replace("model.model.model", "model.model")] = tensors[name].clone()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_repeat_first, "q_proj twice, by different names"),
        (lambda tensors: tensors.clear(), "has no matrices"),
        (lambda tensors: tensors.pop(FIRST), "lora_A and lora_B"),
        (_replaced(torch.zeros(4, 65)), "64 x 65"),
        (_replaced(torch.zeros(3, 64)), "rank 4"),
        (_replaced(torch.zeros(4)), "two matrices"),
        (_replaced(torch.zeros(0, 64)), "two matrices"),
        (_replaced(torch.full((4, 64), torch.nan)), "not finite"),
        (_replaced(torch.full((4, 64), torch.inf)), "not finite"),
        (_renamed("base_model.model.lm_head.lora_A.weight"), "lm_head"),
        (_renamed("base_model.model.model.embed_tokens.lora_embedding_A"), "not a low-rank"),
        (_renamed("model.layers.0.self_attn.q_proj.weight"), "not a low-rank"),
        (_renamed(FIRST.replace("layers.0", "layers.7")), "lora_A and lora_B|not a linear"),
        (
            _renamed(FIRST.replace("model.layers", "vision.layers")),
            "lora_A and lora_B|not a linear",
        ),
    ],
)
def test_tensors(base: Path, tmp_path: Path, change: Change, expected: str) -> None:
    adapter = write_adapter(base, tmp_path)
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)

    with pytest.raises(ModelError, match=expected):
        load(base, adapter)


def test_experts_by_name_and_stacked(tmp_path: Path) -> None:
    base = make_model_folder(tmp_path / "base", FAMILY_VARIANTS["qwen3-moe"])
    config = read_model_config(SafetensorsFolder(base))
    assert config.moe is not None
    names, rank = ("down_proj",), 4 * config.moe.num_experts
    parameters = ["mlp.experts.down_proj"]
    adapter = write_adapter(base, tmp_path / "own", names=names, target_parameters=parameters)
    path = adapter / WEIGHTS
    prefix = "base_model.model.model.layers.0.mlp.experts.lora_"
    stacked = {
        f"{prefix}A.weight": torch.zeros(rank, config.moe.expert_size),
        f"{prefix}B.weight": torch.zeros(config.hidden_size, rank),
    }
    save_file(load_file(path) | stacked, path)

    with pytest.raises(ModelError, match="down_proj twice, by different names"):
        load(base, adapter)


def test_ranks_above_the_limit(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="max_lora_rank is 2"):
        load(base, write_adapter(base, tmp_path), max_rank=2)


def test_scales_beyond_the_range_of_the_model(base: Path, tmp_path: Path) -> None:
    config = read_model_config(SafetensorsFolder(base))
    active = ActiveAdapters(TORCH_LOW_RANK)
    table = AdapterTable(active, config, torch.float16, torch.device("cpu"), 16, 1, 1)
    assert table.load(PeftFolder(write_adapter(base, tmp_path / "small"))).num_bytes

    with pytest.raises(ModelError, match=r"exceed the range of torch\.float16 .*lower lora_alpha"):
        table.load(PeftFolder(write_adapter(base, tmp_path / "large", alpha=1e6)))


def test_files_that_are_too_large_are_not_read(base: Path, tmp_path: Path) -> None:
    weights = write_adapter(base, tmp_path) / WEIGHTS
    with weights.open("r+b") as file:
        file.write((2 << 20).to_bytes(8, "little"))
    with pytest.raises(ModelError, match=r"its header has 2097152 bytes, .*max_lora_rank is 16"):
        load(base, tmp_path)

    os.truncate(weights, 1 << 40)
    with pytest.raises(ModelError, match=r"has 1099511627776 bytes, .*max_lora_rank is 16"):
        load(base, tmp_path)

    os.truncate(tmp_path / CONFIG, 1 << 40)
    with pytest.raises(ModelError, match="more than 1048576 bytes"):
        load(base, tmp_path)


def with_unknown_dtype() -> bytes:
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(2)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * 64, with_unknown_dtype()])
def test_damaged_weights(base: Path, tmp_path: Path, content: bytes) -> None:
    adapter = write_adapter(base, tmp_path)
    (adapter / "adapter_model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match="cannot be read"):
        load(base, adapter)


def test_weights_that_change_after_they_were_hashed(base: Path, tmp_path: Path) -> None:
    folder = PeftFolder(write_adapter(base, tmp_path))
    hashed = folder.digest()
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")

    assert folder.digest() == hashed
    assert len(list(folder.modules())) > 1


def test_pickled_weights_are_not_read(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(base, tmp_path)
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")

    with pytest.raises(ModelError, match="safe_serialization"):
        load(base, adapter)


def test_an_adapter_of_another_model(base: Path, tmp_path: Path) -> None:
    other = make_model_folder(tmp_path / "other", VARIANTS["qwen3"])
    with pytest.raises(ModelError, match="this model is"):
        load(base, write_adapter(other, tmp_path / "adapter"))


def write_stacked(folder: Path, module: str, num_experts: int = 8, **settings: Any) -> Path:
    """Write an adapter of the stacked matrices of experts."""
    settings = {"peft_type": "LORA", "r": 2, "target_parameters": ["down_proj"], **settings}
    prefix = f"base_model.model.model.layers.0.{module}.lora_"
    tensors = {
        f"{prefix}A.weight": torch.ones(2 * num_experts, 32),
        f"{prefix}B.weight": torch.ones(64, 2 * num_experts),
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("moe"), FAMILY_VARIANTS["qwen3-moe"])


def test_a_good_adapter_of_experts(moe: Path, tmp_path: Path) -> None:
    assert load(moe, write_stacked(tmp_path, "mlp.experts")) == 8


@pytest.mark.parametrize(
    ("module", "num_experts", "settings", "expected"),
    [
        ("mlp.experts", 7, {}, "rank 2 for each of 8 experts"),
        ("mlp.experts", 8, {"target_parameters": ["gate_up_proj"]}, "64 x 32; .* is 64 x 64"),
        ("mlp.experts", 8, {"target_parameters": None}, "experts is not a linear layer"),
        ("mlp.experts", 8, {"target_parameters": "all"}, "must be a list of names"),
        ("mlp.experts", 8, {"target_parameters": [1]}, "must be a list of names"),
        ("mlp.experts.base_layer", 8, {}, "base_layer is not a linear layer"),
        ("mlp.experts.8.down_proj", 1, {}, "not a linear layer"),
        ("feed_forward.experts", 8, {}, "not a linear layer"),
    ],
)
def test_experts_that_do_not_fit(
    moe: Path,
    tmp_path: Path,
    module: str,
    num_experts: int,
    settings: dict[str, Any],
    expected: str,
) -> None:
    with pytest.raises(ModelError, match=expected):
        load(moe, write_stacked(tmp_path, module, num_experts, **settings))


def test_experts_of_a_model_without_any(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a linear layer"):
        load(base, write_stacked(tmp_path, "mlp.experts"))


def test_digests_depend_on_content_alone(base: Path, tmp_path: Path) -> None:
    digests = {
        PeftFolder(write_adapter(base, tmp_path / str(index), seed=seed, alpha=alpha)).digest()
        for index, (seed, alpha) in enumerate([(1, 8), (1, 8), (2, 8), (1, 16)])
    }
    assert len(digests) == 3


def test_patterns_of_ranks_and_scales(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(
        base,
        tmp_path,
        rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 8, "(": 3},
        alpha_pattern={r".*\.v_proj": 32},
    )
    config = PeftAdapterConfig.read(adapter)
    assert config.rank_of("model.layers.0.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.1.mlp.down_proj") == 8
    assert config.rank_of("model.layers.0.mlp.down_proj") == 4
    assert config.scale("model.layers.0.self_attn.v_proj", 4) == 8.0
    assert config.scale("model.layers.0.self_attn.k_proj", 4) == 2.0
