"""Loads a decoder from weight files. Each tensor is read once, and quantized if configured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.runner.kernels.choose import Parts
from engine.runner.model.config import ModelConfig
from engine.runner.model.decoder import Decoder
from engine.runner.model.layers import Layer
from engine.runner.model.ops import Linear
from engine.runner.model_info import LoadProgress, LoadProgressCallback
from engine.runner.weights.packed import is_packed, read_packed
from engine.runner.weights.quantization import Quantization
from engine.runner.weights.quantize import (
    Quantize,
    Quantized,
    have_same_order,
    stacked,
    to_int4,
    to_int8,
)
from engine.runner.weights.safetensors import Shape, WeightFiles
from engine.runner.weights.tensor_names import check_tensors, expected_tensors
from errors import ModelError

QUANTIZERS: Mapping[str, Quantize | None] = {"none": None, "int8": to_int8, "int4": to_int4}


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Dtype, device, implementation and quantization of the loaded weights."""

    dtype: torch.dtype
    device: torch.device
    parts: Parts
    quantize: str = "none"


def load_decoder(
    config: ModelConfig,
    files: WeightFiles,
    target: LoadTarget,
    on_progress: LoadProgressCallback | None = None,
) -> Decoder:
    """Check all tensors before the first one is read, then copy each to its place once."""
    check_tensors(config, files)
    loader = _Loader(config, files, target, on_progress)
    embedding = loader.embedding("model.embed_tokens")
    layers = [_load_layer(config, loader, f"model.layers.{i}") for i in range(config.num_layers)]
    norm = loader.stacked(["model.norm.weight"], (config.hidden_size,))
    head = embedding
    if not config.ties_embeddings:
        head = loader.embedding("lm_head")
    parts = target.parts
    return Decoder(config, parts.ops, embedding, parts.make_layers(config, layers), norm, head)


class _Loader:
    """Copies tensors to their final places; matrices of one fused linear layer are stacked."""

    def __init__(
        self,
        config: ModelConfig,
        files: WeightFiles,
        target: LoadTarget,
        on_progress: LoadProgressCallback | None,
    ) -> None:
        self._quantization = config.quantization
        self._shapes = expected_tensors(config)
        self._files = files
        self._names = frozenset(files.names())
        self._target = target
        self._on_progress = on_progress
        self._loaded = 0
        self._total = sum(map(self._bytes_of, self._shapes))

    def stacked(self, names: list[str], shape: Shape) -> Tensor:
        whole = torch.empty(shape, dtype=self._target.dtype, device=self._target.device)
        parts = whole.split([self._shapes[name][0] for name in names])
        for name, part in zip(names, parts, strict=True):
            self._files.copy_into(name, part)
            self._report(name)
        return whole

    def embedding(self, name: str) -> Linear:
        """Load the embedding or LM head. int4 is too inexact for them, so they use int8."""
        quantize = None if self._target.quantize == "none" else to_int8
        return self._target.parts.ops.linear(self._matrix([name], quantize), None)

    def linear(self, names: list[str], has_bias: bool) -> Linear:
        matrix = self._matrix(names, QUANTIZERS[self._target.quantize])
        rows = sum(self._shapes[f"{name}.weight"][0] for name in names)
        biases = [f"{name}.bias" for name in names]
        return self._target.parts.ops.linear(
            matrix, self.stacked(biases, (rows,)) if has_bias else None
        )

    def _matrix(self, names: list[str], quantize: Quantize | None) -> Tensor | Quantized:
        how, weights = self._quantization, [f"{name}.weight" for name in names]
        if how is not None and any(is_packed(name, self._names, how) for name in names):
            return self._load_packed(names, how)
        shapes = [self._shapes[weight] for weight in weights]
        matrix = self.stacked(weights, (sum(rows for rows, _ in shapes), shapes[0][1]))
        return matrix if quantize is None else quantize(matrix)

    def _load_packed(self, names: list[str], how: Quantization) -> Quantized:
        if not all(is_packed(name, self._names, how) for name in names):
            raise ModelError(f"{', '.join(names)}: some are quantized and some are not")
        parts = [self._load_unpacked(name, how) for name in names]
        if not have_same_order(parts):
            raise ModelError(f"{', '.join(names)}: their columns have different orders")
        return stacked(parts)

    def _load_unpacked(self, name: str, how: Quantization) -> Quantized:
        shape = self._shapes[f"{name}.weight"]
        unpacked = read_packed(
            name, shape, self._names, how, self._files.tensor, self._target.dtype
        )
        self._report(f"{name}.weight")
        return unpacked.on(self._target.device)

    def _bytes_of(self, name: str) -> int:
        return torch.Size(self._shapes[name]).numel() * self._target.dtype.itemsize

    def _report(self, name: str) -> None:
        self._loaded += self._bytes_of(name)
        if self._on_progress is not None:
            self._on_progress(LoadProgress(self._loaded, self._total))


def _load_layer(config: ModelConfig, loader: _Loader, prefix: str) -> Layer:
    hidden, head = (config.hidden_size,), (config.head_dim,)
    qk_norm = config.has_qk_norm
    qkv = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
    return Layer(
        input_norm=loader.stacked([f"{prefix}.input_layernorm.weight"], hidden),
        qkv=loader.linear(qkv, config.has_qkv_bias),
        q_norm=loader.stacked([f"{prefix}.self_attn.q_norm.weight"], head) if qk_norm else None,
        k_norm=loader.stacked([f"{prefix}.self_attn.k_norm.weight"], head) if qk_norm else None,
        output=loader.linear([f"{prefix}.self_attn.o_proj"], config.has_output_bias),
        post_norm=loader.stacked([f"{prefix}.post_attention_layernorm.weight"], hidden),
        gate_up=loader.linear(
            [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], config.has_mlp_bias
        ),
        down=loader.linear([f"{prefix}.mlp.down_proj"], config.has_mlp_bias),
    )
