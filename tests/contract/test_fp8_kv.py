"""FP8 keys and values: their bytes are those of torch, with the scales of a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.core.sampling import SamplingParams
from baton.engine.runner.weights.kv_scales import check_kv_scheme
from baton.llm import LLM
from tests.contract.test_runner_attention import IMPLEMENTATIONS
from tests.support.attention_world import MakeAttention, Part, Shape, World, bits
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder, prompt_of
from tests.support.scaled_kv import grown_folder
from tests.support.unknown_architectures import UNKNOWN

needs_kernels = pytest.mark.skipif(not kernels_by_variant(), reason="no C++ compiler here")
FP8 = torch.float8_e4m3fn
EACH = [
    pytest.param(each.make, id=name)
    for name, each in IMPLEMENTATIONS.items()
    if each.kv_dtype is FP8
]
each_make = pytest.mark.parametrize("make", EACH)
ONE_LAYER = Shape(
    num_heads=1,
    num_kv_heads=1,
    head_dim=256,
    block_size=16,
    num_layers=1,
    windows=(None,),
    chunks=(None,),
    dtype=torch.bfloat16,
    kv_dtype=FP8,
)


@each_make
@pytest.mark.parametrize("scale", [1.0, 0.0371])
def test_each_bfloat16_is_stored_as_torch_rounds_it(make: MakeAttention, scale: float) -> None:
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    world = World(ONE_LAYER, [Part(0, 256)], seed=1)
    keys = numbers.view(256, 1, 256)
    scales = torch.full((2, 1), scale)
    layer = replace(world.attention(0), kv_scales=None if scale == 1.0 else scales)
    layout = world.layout()

    make(world.kv, [layer]).begin(layout).write(0, keys, keys)

    blocks, slots = (
        torch.from_numpy(each) for each in (layout.write_blocks[0], layout.write_offsets)
    )
    expected = (keys.float() / scale).clamp(-448.0, 448.0).to(FP8)
    for tensor in range(2):
        assert torch.equal(bits(world.kv[blocks, 0, tensor, :, slots]), bits(expected))


@each_make
@pytest.mark.parametrize("num_heads", [1, 40])  # few rows are read in place
def test_each_code_is_read_exactly(make: MakeAttention, num_heads: int) -> None:
    """A token that sees only itself gets its value."""
    shape = replace(ONE_LAYER, num_heads=num_heads, windows=(1,))
    world = World(shape, [Part(7, 1)], seed=1)
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FP8)
    codes = torch.where(codes.float().isnan(), 0.0, codes.float()).to(FP8)
    layer = replace(world.attention(0), kv_scales=None)
    running = make(world.kv, [layer]).begin(world.layout())
    exact = codes.float().to(torch.bfloat16)
    running.write(0, torch.zeros(1, 1, 256, dtype=torch.bfloat16), exact.view(1, 1, 256))

    found = running.attend(0, torch.zeros(1, num_heads, 256, dtype=torch.bfloat16))

    assert torch.equal(found, exact.expand(1, num_heads, 256))


def logprobs_of(folder: Path, kv_cache_dtype: str, kernels: str = "torch") -> Tensor:
    dtype = "float32" if kernels == "torch" else "bfloat16"
    with LLM(
        str(folder),
        dtype=dtype,
        kernels=kernels,
        kv_cache_memory="4MiB",
        kv_cache_dtype=kv_cache_dtype,
    ) as llm:
        [answer] = llm.generate(prompt_of(60), SamplingParams(max_tokens=1, prompt_logprobs=0))
    return torch.tensor([one.logprob for one in answer.prompt_logprobs or () if one])


BOTH = torch.tensor(4096.0)
BY_HEAD = torch.tensor([512.0, 4096.0])


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": BOTH, "v_scale": BOTH[None]},
        {"attn.k_scale": BOTH, "attn.v_scale": BOTH},
        {"k_proj.k_scale": BOTH, "v_proj.v_scale": BOTH},
        {"k_scale": BY_HEAD, "v_scale": BY_HEAD[:, None, None]},
        {"k_scale": BOTH.bfloat16()},  # also that of the values
        {"kv_scale": BOTH},
    ],
    ids=lambda scales: " ".join(f"{name}{list(scale.shape)}" for name, scale in scales.items()),
)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_kernels)])
def test_scales_of_a_checkpoint_make_up_for_the_sizes_of_keys_and_values(
    tmp_path: Path, scales: dict[str, Tensor], kernels: str
) -> None:
    """Powers of two: the stored numbers are the same, and so is every bit of the results."""
    plain = make_model_folder(tmp_path / "plain", VARIANTS["llama"])
    growth = next(iter(scales.values())).float().flatten().expand(2)
    grown = grown_folder(tmp_path / "grown", growth, scales)

    expected, found = (logprobs_of(each, "fp8", kernels) for each in (plain, grown))

    assert torch.equal(found, expected)


def test_layers_on_the_modules_of_transformers_have_scales_too(tmp_path: Path) -> None:
    variant, scales = UNKNOWN["gemma"], {"k_scale": BOTH, "v_scale": BOTH}
    plain = make_model_folder(tmp_path / "plain", variant)
    grown = grown_folder(tmp_path / "grown", BOTH.expand(2), scales, variant)

    expected, found = (logprobs_of(each, "fp8") for each in (plain, grown))

    assert torch.equal(found, expected)


def test_numbers_above_448_saturate_without_scales(tmp_path: Path) -> None:
    folder = grown_folder(tmp_path, BOTH.expand(2), {})

    expected, found = (logprobs_of(folder, kv) for kv in ("auto", "fp8"))

    assert found.isfinite().all()
    assert (found - expected).abs().median() > 0.2


@pytest.mark.parametrize("scale", [torch.zeros(1), torch.tensor(math.nan), torch.ones(3)], ids=str)
def test_scales_that_are_none_are_refused(tmp_path: Path, scale: Tensor) -> None:
    folder = grown_folder(tmp_path, torch.ones(2), {"k_scale": scale})

    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale: FP8 KV needs one number"):
        logprobs_of(folder, "fp8")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "config.json",
            {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}},
            "kv_cache_scheme.*num_bits",
        ),
        (
            "hf_quant_config.json",
            {"quantization": {"kv_cache_quant_algo": "NVFP4"}},
            "kv_cache_quant_algo.*must be FP8",
        ),
    ],
)
def test_scales_of_another_format_are_refused(
    tmp_path: Path, file: str, content: dict[str, object], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))

    with pytest.raises(ModelError, match=message):
        check_kv_scheme(SafetensorsFolder(tmp_path))


def test_scales_of_fp8_are_those_that_the_files_declare(tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {"quantization_config": {"kv_cache_scheme": scheme}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    declared = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(declared))

    check_kv_scheme(SafetensorsFolder(tmp_path))
