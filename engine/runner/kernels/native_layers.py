"""Fused native kernels: one call per decoder layer."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass
from engine.runner.kernels.native import (
    Kernels,
    NativeLinear,
    NativeOps,
    NativePass,
    NativeQuantizedLinear,
)
from engine.runner.model.config import ModelConfig
from engine.runner.model.layers import Layer, LayerPass, Layers, UnfusedLayers
from engine.runner.model.ops import Angles, Linear

_INT, _THREADS, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    num_rows: int
    num_columns: int
    _fields_ = (
        *((name, _POINTER) for name in ("packed", "bias")),
        *((name, _INT) for name in ("bits", "num_rows", "num_columns", "group")),
    )


class _Layer(ctypes.Structure):
    qkv: _Matrix
    gate_up: _Matrix
    down: _Matrix
    _fields_ = (
        *((name, _POINTER) for name in ("input_norm", "q_norm", "k_norm", "post_norm")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _INT) for name in ("index", "num_heads", "window")),
        ("epsilon", _FLOAT),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        ("blocks", _POINTER),
        *((name, _INT) for name in ("num_layers", "num_kv_heads", "block_size", "head_dim")),
        *((name, _POINTER) for name in ("write_blocks", "write_offsets")),
        *((name, _POINTER) for name in ("tables", "lengths", "starts", "num_queries")),
        *((name, _INT) for name in ("table_stride", "num_sequences", "num_single", "num_tokens")),
        *((name, _POINTER) for name in ("cosines", "sines", "narrow_buf", "wide_buf", "heads_buf")),
        ("scale", _FLOAT),
        ("num_threads", _THREADS),
    )


def native_layers(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> Layers:
    """Return fused layers, or `UnfusedLayers` if a matrix needs its columns reordered."""
    plain = UnfusedLayers(config, NativeOps(kernels), layers)
    matrices = [
        _matrix(linear)
        for layer in layers
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    if any(matrix is None for matrix in matrices):
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
        native_pass = _Pass(
            **attention.fields,
            num_tokens=len(cosines),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            narrow_buf=buffers[0].data_ptr(),
            wide_buf=buffers[1].data_ptr(),
            heads_buf=buffers[2].data_ptr(),
            scale=1 / math.sqrt(self._config.head_dim),
            num_threads=self._kernels.num_threads,
        )

        alive = cosines, sines, buffers, attention
        return _NativeLayerPass(self._kernels, self._layers, native_pass, alive)

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
        self, kernels: Kernels, layers: Sequence[_Layer], native_pass: _Pass, alive: object
    ) -> None:
        self._kernels = kernels
        self._layers = [ctypes.addressof(layer) for layer in layers]
        self._pass = ctypes.addressof(native_pass)
        self._alive = layers, native_pass, alive  # owners of the addressed memory

    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        self._kernels.layer(self._layers[index], self._pass, hidden_states.data_ptr())
        return hidden_states

    def write(self, index: int, hidden_states: Tensor) -> None:
        hidden_states = hidden_states.contiguous()
        self._kernels.layer_write(self._layers[index], self._pass, hidden_states.data_ptr())


def _layer(config: ModelConfig, index: int, layer: Layer) -> _Layer:
    return _Layer(
        input_norm=layer.input_norm.data_ptr(),
        q_norm=_address(layer.q_norm),
        k_norm=_address(layer.k_norm),
        post_norm=layer.post_norm.data_ptr(),
        qkv=_matrix(layer.qkv),
        output=_matrix(layer.output),
        gate_up=_matrix(layer.gate_up),
        down=_matrix(layer.down),
        index=index,
        num_heads=config.num_heads,
        window=config.sliding_windows[index] or 0,
        epsilon=config.rms_norm_eps,
    )


def _matrix(linear: Linear) -> _Matrix | None:
    """Return None for a matrix that is not native or needs its columns reordered."""
    if isinstance(linear, NativeLinear):
        layout = 16, linear.num_rows, linear.num_columns, 0
    elif isinstance(linear, NativeQuantizedLinear) and linear.order is None:
        layout = linear.form
    else:
        return None
    return _Matrix(linear.packed.data_ptr(), _address(linear.bias), *layout)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
