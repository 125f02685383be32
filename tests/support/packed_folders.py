"""Quantized model folders: GPTQ, AWQ, compressed-tensors, FP8 and MXFP4."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.checkpoint.quantized import Quantized


@dataclass(frozen=True, slots=True)
class Format:
    """Format of a quantized folder."""

    config: Mapping[str, Any]
    bits: int = 4
    group: int = 16
    is_symmetric: bool = False
    settings: Mapping[str, bool] = field(default_factory=dict)
    # Names of quantized matrices.
    linears: str = r".*(_proj|_with_mqa|experts\.\d+\.w[123])\.weight"


def _compressed(written: str, bits: int, group: int, strategy: str = "group") -> Mapping[str, Any]:
    weights = {"type": "int", "num_bits": bits, "strategy": strategy, "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _float8(strategy: str, **settings: Any) -> Mapping[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, **settings}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": ["lm_head"],
    }


FORMATS: Mapping[str, Format] = {
    "gptq": Format({"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "gptq-8-bits": Format({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8, 32),
    "gptq-v2-ordered": Format(
        {"quant_method": "gptq", "checkpoint_format": "gptq_v2", "bits": 4, "group_size": 16},
        settings={"is_ordered": True},
    ),
    "awq": Format({"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 16}),
    "packed": Format(_compressed("pack-quantized", 4, 16), is_symmetric=True),
    "packed-with-zeros": Format(_compressed("pack-quantized", 4, 16)),
    "bytes": Format(_compressed("int-quantized", 8, 0, "channel"), 8, 0, is_symmetric=True),
    "fp8": Format({"quant_method": "fp8", "weight_block_size": [24, 40]}, 8),
    "fp8-one-scale": Format(
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}, 8
    ),
    "float8-rows": Format(_float8("channel"), 8),
    "float8-one-scale": Format(_float8("tensor"), 8),
    "float8-blocks": Format(_float8("block", block_structure=[32, 32]), 8),
}
MXFP4 = Format({"quant_method": "mxfp4"}, linears=r".*\.experts\.(gate_up|down)_proj")

EVERY_FORMAT = {**FORMATS, "mxfp4": MXFP4}
# Formats of each family of which quantized models are published. Fused matrices, permuted heads,
# experts of their own and shared ones, and text models within others.
FORMATS_BY_FAMILY: Mapping[str, tuple[str, ...]] = {
    "mistral": ("gptq", "awq", "packed"),
    "mistral3": ("packed", "fp8-one-scale", "float8-rows"),
    "qwen2": ("gptq", "awq", "packed", "float8-rows"),
    "qwen2.5-vl": ("awq", "packed", "float8-rows"),
    "qwen3": ("gptq", "awq", "packed", "fp8"),
    "qwen3-vl": ("awq", "fp8"),
    "gemma2": ("gptq", "awq", "float8-rows"),
    "gemma3": ("packed", "float8-rows"),
    "gemma3-vision": ("packed", "float8-rows"),
    "phi3": ("gptq", "awq", "packed-with-zeros", "float8-rows"),
    "phi4-mini": ("packed", "float8-rows"),
    "glm4": ("gptq-v2-ordered", "fp8"),
    "granite": ("packed", "float8-rows"),
    "granite-4": ("packed", "float8-rows"),
    "smollm3": ("packed", "float8-rows"),
    "seed-oss": ("awq",),
    "qwen2-moe": ("gptq",),
    "qwen3-moe": ("awq", "gptq-v2-ordered", "packed", "fp8", "float8-rows"),
    "qwen3-vl-moe": ("awq", "fp8"),
    "mixtral": ("gptq", "awq", "packed", "float8-rows"),
    "minimax-m2": ("fp8",),
    "glm4-moe": ("awq", "packed", "fp8", "float8-rows"),
    "gpt-oss": ("mxfp4",),
    "deepseek-v2-lite": ("bytes",),
    "deepseek-v3": ("fp8",),
    "llama4-vision": ("packed", "float8-rows"),
}
COMBINATIONS = tuple(
    (family, written) for family, formats in FORMATS_BY_FAMILY.items() for written in formats
)


def write_quantized(source: Path, target: Path, written: Format) -> tuple[Path, Path]:
    """Write two folders with the source's shapes: quantized, and dequantized."""
    generator = torch.Generator().manual_seed(3)
    packed, plain = target / "packed", target / "plain"
    for folder in (packed, plain):
        shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    stored, restored = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if re.fullmatch(written.linears, name):
            parts, restored[name] = _quantized(weight, written, generator)
            del stored[name]
            linear = name.removesuffix(".weight")
            stored |= {linear + part: tensor.contiguous() for part, tensor in parts.items()}
    save_file(stored, packed / "model.safetensors")
    save_file(restored, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = dict(written.config)
    (packed / "config.json").write_text(json.dumps(config))
    return packed, plain


def _quantized(
    weight: Tensor, written: Format, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    """Return random weights of this shape: the stored tensors, and the dequantized matrix."""
    method = written.config["quant_method"]
    if method == "mxfp4":
        return _as_mxfp4(weight, generator)
    if method == "fp8" or written.config.get("format") == "float-quantized":
        return _as_float8(weight, written, generator)
    matrix = _drawn(weight, written, generator)
    parts = _stored(matrix, written)
    return {f".{part}": tensor for part, tensor in parts.items()}, matrix.dequantize()


def _as_mxfp4(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    experts, columns, rows = weight.shape
    groups = experts, rows, columns // 32
    blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(120, 127, groups, generator=generator, dtype=torch.uint8)
    restored = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": exponents}, restored.contiguous()


def _as_float8(
    weight: Tensor, written: Format, generator: torch.Generator
) -> tuple[dict[str, Tensor], Tensor]:
    numbers = torch.randn(weight.shape, generator=generator).to(torch.float8_e4m3fn)
    rows, columns = weight.shape
    if written.config["quant_method"] == "fp8":
        block = written.config["weight_block_size"] or (rows, columns)
        suffix = "_scale_inv"
    else:
        weights = written.config["config_groups"]["group_0"]["weights"]
        by_strategy = {"channel": (1, columns), "tensor": (rows, columns)}
        block = by_strategy.get(weights["strategy"]) or weights["block_structure"]
        suffix = "_scale"
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) / 4
    every = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    restored = numbers.float() * every[:rows, :columns]
    is_single = block == (rows, columns)
    if is_single:
        scales = scales[0, 0] if suffix == "_scale_inv" else scales[0]
    parts = {".weight": numbers, f".weight{suffix}": scales}
    if is_single:
        parts[".input_scale" if suffix == "_scale" else ".activation_scale"] = torch.tensor(2.0)
    return parts, restored


def _drawn(weight: Tensor, written: Format, generator: torch.Generator) -> Quantized:
    rows, columns = weight.shape
    group, middle = written.group or columns, 1 << (written.bits - 1)
    num_groups = columns // group
    numbers = torch.randint(0, 2 * middle, (rows, columns), generator=generator)
    zeros = torch.randint(1, 2 * middle, (rows, num_groups), generator=generator)
    if written.is_symmetric:
        zeros[:] = middle
    scales = (torch.rand(rows, num_groups, generator=generator) + 0.5) / middle / 4
    matrix = Quantized(
        numbers.to(torch.uint8),
        scales.half().float(),
        zeros.to(torch.uint8),
        written.bits,
        group,
        torch.float32,
    )
    if not written.settings.get("is_ordered"):
        return matrix
    # The same in every matrix of that many columns, as those that share their input have it.
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    return replace(matrix, order=order)


def _stored(matrix: Quantized, written: Format) -> dict[str, Tensor]:
    method = written.config["quant_method"]
    if method == "gptq":
        return _as_gptq(matrix, written)
    if method == "awq":
        return _as_awq(matrix)
    scales = {"weight_scale": matrix.scales.half()}
    if written.config["format"] == "int-quantized":
        return {"weight": (matrix.numbers.int() - 128).to(torch.int8), **scales}
    parts = {"weight_packed": _words(matrix.numbers, matrix.bits), **scales}
    parts["weight_shape"] = torch.tensor(matrix.numbers.shape)
    if not written.is_symmetric:
        parts["weight_zero_point"] = _words(matrix.zeros.T, matrix.bits).T
    return parts


def _as_gptq(matrix: Quantized, written: Format) -> dict[str, Tensor]:
    columns = torch.arange(matrix.numbers.shape[1])
    numbers, groups = matrix.numbers, columns // matrix.group
    if matrix.order is not None:
        places = matrix.order.argsort()
        numbers, groups = numbers[:, places], groups[places]
    one_less = written.config.get("checkpoint_format", "gptq") == "gptq"
    return {
        "qweight": _words(numbers, matrix.bits).T,
        "qzeros": _words((matrix.zeros - int(one_less)).T, matrix.bits),
        "scales": matrix.scales.T.half(),
        "g_idx": groups.int(),
    }


def _as_awq(matrix: Quantized) -> dict[str, Tensor]:
    def words(numbers: Tensor) -> Tensor:
        eights = numbers.unflatten(1, (-1, 8))
        return _words(eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    scales = matrix.scales.T.half()
    return {"qweight": words(matrix.numbers.T), "qzeros": words(matrix.zeros.T), "scales": scales}


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Pack [rows, numbers] into [rows, words], the first number in the lowest bits."""
    per_word = 32 // bits
    words = torch.zeros(len(numbers), numbers.shape[1] // per_word, dtype=torch.int64)
    for place in range(per_word):
        words |= numbers[:, place::per_word].long() << (bits * place)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()
