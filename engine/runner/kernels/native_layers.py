"""Fused native kernels: one call per decoder layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass
from engine.runner.kernels.abi import LayerArgs, PackedMatrix, PassArgs
from engine.runner.kernels.native import Kernels, NativeLinear, NativeOps, NativePass, address
from engine.runner.model.config import ModelConfig
from engine.runner.model.layers import Layer, LayerPass, Layers, UnfusedLayers
from engine.runner.model.ops import Angles, Linear


def native_layers(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> Layers:
    """Return fused layers, or `UnfusedLayers` if a matrix needs its columns reordered."""
    plain = UnfusedLayers(config, NativeOps(kernels), layers)
    linears = [
        linear
        for layer in layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    if any(_matrix(linear) is None for linear in linears):
        return plain
    return NativeLayers(kernels, config, layers, plain)


class NativeLayers:
    """Implements `Layers`, bit-identical to `UnfusedLayers` with the same kernels."""

    def __init__(
        self, kernels: Kernels, config: ModelConfig, layers: Sequence[Layer], plain: UnfusedLayers
    ) -> None:
        self._kernels = kernels
        self._config = config
        self._plain = plain  # keeps the tensors alive
        self._layers = [_layer(config, index, layer) for index, layer in enumerate(layers)]

    def begin(self, angles: Angles, attention: AttentionPass) -> LayerPass:
        if not isinstance(attention, NativePass):
            return self._plain.begin(angles, attention)
        cosines, sines = (angle.contiguous() for angle in angles)
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
    return LayerArgs(
        input_norm=layer.input_norm.data_ptr(),
        q_norm=address(layer.q_norm),
        k_norm=address(layer.k_norm),
        post_norm=layer.post_norm.data_ptr(),
        qkv=_matrix(layer.qkv),
        output=_matrix(layer.output),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        index=index,
        num_heads=config.num_heads,
        window=config.sliding_windows[index] or 0,
        epsilon=config.rms_norm_eps,
        scale=1 / math.sqrt(config.head_dim),
    )


def _matrix(linear: Linear) -> PackedMatrix | None:
    """Return None for a matrix that is not native or needs its columns reordered."""
    if isinstance(linear, NativeLinear) and linear.column_order is None:
        return linear.matrix
    return None
