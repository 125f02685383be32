"""Fused native kernels: one call per decoder layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass
from engine.runner.kernels.abi import LayerArgs, PackedMatrix, PassArgs
from engine.runner.kernels.native import Kernels, NativeLinear, NativeOps
from engine.runner.kernels.native_attention import NativePass
from engine.runner.model.config import Activation, LayerConfig, ModelConfig, QkNorm
from engine.runner.model.experts import Mlp
from engine.runner.model.layers import Layer, LayerPass, Layers, UnfusedLayers
from engine.runner.model.ops import Linear, Norm
from engine.runner.model.rope import Angles


def native_layers(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> Layers:
    """Return fused layers, or `UnfusedLayers` if the fused kernels lack a part of the model."""
    plain = UnfusedLayers(config, NativeOps(kernels), layers)
    if config.residual_scale != 1.0 or config.activation is not Activation.SILU:
        return plain
    parts = zip(config.layers, layers, strict=True)
    if len(config.ropes) > 1 or not all(_is_fusible(*part) for part in parts):
        return plain
    return NativeLayers(kernels, config, layers, plain)


def _is_fusible(config: LayerConfig, layer: Layer) -> bool:
    """Whether the fused kernels compute this layer. They need columns in their own order."""
    norms = (layer.input_norm, layer.mlp_norm)
    if not isinstance(layer.mlp, Mlp) or layer.attention_norm or layer.mlp_output_norm:
        return False
    if config.qk_norm is QkNorm.ALL_HEADS or config.chunk is not None:
        return False
    if any(norm is None or norm.rounds_once for norm in norms):
        return False
    if any(norm is not None and norm.rounds_once for norm in (layer.q_norm, layer.k_norm)):
        return False
    linears = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    return all(_matrix(linear) is not None for linear in linears)


class NativeLayers:
    """Implements `Layers`, bit-identical to `UnfusedLayers` with the same kernels."""

    def __init__(
        self, kernels: Kernels, config: ModelConfig, layers: Sequence[Layer], plain: UnfusedLayers
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._plain = plain  # keeps the tensors alive
        self._layers = [_layer(config, index, layer) for index, layer in enumerate(layers)]

    def begin(self, angles: Sequence[Angles], attention: AttentionPass) -> LayerPass:
        if not isinstance(attention, NativePass):
            return self._plain.begin(angles, attention)
        cosines, sines = (angle.contiguous() for angle in angles[0])
        buffers = self._allocate_buffers(len(cosines))
        args = PassArgs(
            kv=attention.kv,
            batch=attention.batch,
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            narrow_buf=buffers[0].data_ptr(),
            wide_buf=buffers[1].data_ptr(),
            heads_buf=buffers[2].data_ptr(),
            num_threads=self._kernels.num_threads,
        )
        alive = cosines, sines, buffers, attention
        return _NativeLayerPass(self._kernels, self._layers, args, alive)

    def _allocate_buffers(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        config, layer = self._config, self._layers[0]
        query_rows = config.num_heads * config.head_dim
        widest = max(layer.qkv.num_rows, layer.gate_up.num_rows, config.hidden_size)
        max_heads = max(query_rows, layer.down.num_columns)
        sizes = max(config.hidden_size, query_rows), widest, max_heads
        narrow, wide, heads = (
            torch.empty(num_tokens, size, dtype=torch.bfloat16) for size in sizes
        )
        return narrow, wide, heads


class _NativeLayerPass:
    def __init__(
        self, kernels: Kernels, layers: Sequence[LayerArgs], args: PassArgs, alive: object
    ) -> None:
        self._library = kernels.library
        self._layers = layers
        self._args = args
        self._alive = alive  # owners of the memory that `args` points to

    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        self._library.baton_layer(self._layers[index], self._args, hidden_states.data_ptr())
        return hidden_states

    def write(self, index: int, hidden_states: Tensor) -> None:
        hidden_states = hidden_states.contiguous()
        self._library.baton_layer_write_kv(
            self._layers[index], self._args, hidden_states.data_ptr()
        )


def _layer(config: ModelConfig, index: int, layer: Layer) -> LayerArgs:
    assert isinstance(layer.mlp, Mlp)
    return LayerArgs(
        input_norm=_weight(layer.input_norm),
        q_norm=_weight(layer.q_norm),
        k_norm=_weight(layer.k_norm),
        post_norm=_weight(layer.mlp_norm),
        qkv=_matrix(layer.qkv),
        output=_matrix(layer.output),
        gate_up=_matrix(layer.mlp.gate_up),
        down=_matrix(layer.mlp.down),
        index=index,
        num_heads=config.num_heads,
        window=config.layers[index].window or 0,
        epsilon=config.norm.epsilon,
        scale=config.attention_scale,
    )


def _weight(norm: Norm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()


def _matrix(linear: Linear) -> PackedMatrix | None:
    """Return None for a matrix that is not native or needs its columns reordered."""
    if isinstance(linear, NativeLinear) and linear.column_order is None:
        return linear.matrix
    return None
