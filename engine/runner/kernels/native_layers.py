"""Fused native kernels: one call per decoder layer, or per attention of a layer with experts."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from baton.engine.kv_cache.groups import layer_places
from baton.engine.runner.attention.paged_attention import AttentionPass
from baton.engine.runner.kernels.abi import LayerArgs, PackedMatrix, PassArgs, RopeAngles
from baton.engine.runner.kernels.native import (
    Kernels,
    NativeOps,
    native_matrix,
    norm_params,
)
from baton.engine.runner.kernels.native_attention import NativePass
from baton.engine.runner.kernels.native_experts import gate_params
from baton.engine.runner.kernels.torch_parts import torch_parts
from baton.engine.runner.model.config import ModelConfig, QkNorm
from baton.engine.runner.model.experts import Mlp, Moe
from baton.engine.runner.model.layers import (
    Layer,
    LayerPass,
    Layers,
    UnfusedLayers,
    add_mlp,
    gate_of,
)
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.state.linear_attention import LinearAttentionPass

log = logging.getLogger(__name__)


def native_layers(kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> Layers:
    """Return fused layers, or `UnfusedLayers` with latent or linear attention or reordered columns.

    Logs the parts of the model that torch computes.
    """
    parts = torch_parts(config, layers)
    if parts:
        log.info("%s: torch computes the %s", config.architecture, ", the ".join(parts))
    matrices = (native_matrix(linear) for layer in layers for linear in _linears(layer))
    is_plain = config.latent is None and config.recurrent is None and not config.has_output_gate
    if is_plain and None not in matrices:
        return NativeLayers(kernels, config, layers)
    return UnfusedLayers(config, NativeOps(kernels), layers)


def _linears(layer: Layer) -> Iterator[Linear]:
    yield from (layer.qkv, layer.output)
    if isinstance(layer.mlp, Mlp):
        yield from (layer.mlp.gate_up, layer.mlp.down)


class NativeLayers:
    """Implements `Layers`, bit-identical to `UnfusedLayers` with the same kernels."""

    def __init__(self, kernels: Kernels, config: ModelConfig, layers: Sequence[Layer]) -> None:
        self.kernels = kernels
        self.config = config
        self.ops = NativeOps(kernels)
        self.layers = tuple(layers)
        places = layer_places(config.kv_groups())
        self.layer_args = [
            _layer_args(config, index, layer, places[index].place)
            for index, layer in enumerate(layers)
        ]
        self._plain = UnfusedLayers(config, self.ops, layers)

    def begin(
        self,
        angles: Sequence[Angles],
        attention: AttentionPass,
        linear_attention: LinearAttentionPass | None = None,
    ) -> LayerPass:
        if not isinstance(attention, NativePass):
            return self._plain.begin(angles, attention)
        angles = [(cosines.contiguous(), sines.contiguous()) for cosines, sines in angles]
        pointers = [RopeAngles(cosines.data_ptr(), sines.data_ptr()) for cosines, sines in angles]
        by_rope = (RopeAngles * len(angles))(*pointers)
        buffers = self._allocate_buffers(len(angles[0][0]))
        args_by_group = [
            PassArgs(
                kv=attention.kv,
                batch=batch,
                attention=ctypes.addressof(params),
                angles=ctypes.addressof(by_rope),
                narrow_buf=buffers[0].data_ptr(),
                wide_buf=buffers[1].data_ptr(),
                heads_buf=buffers[2].data_ptr(),
                num_threads=self.kernels.num_threads,
            )
            for batch, params in zip(attention.batches, attention.params, strict=True)
        ]
        args = [args_by_group[layer.kv_group] for layer in attention.layers]
        return _NativeLayerPass(self, args, (angles, by_rope, buffers, attention))

    def _allocate_buffers(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        query_rows = config.num_heads * config.head_dim
        wide = max(max(each.qkv.num_rows, each.gate_up.num_rows) for each in self.layer_args)
        heads = max(each.down.num_columns for each in self.layer_args)
        sizes = (
            max(config.hidden_size, query_rows),
            max(config.hidden_size, wide),
            max(query_rows, heads),
        )
        narrow_buf, wide_buf, heads_buf = (
            torch.empty(num_tokens, size, dtype=torch.bfloat16) for size in sizes
        )
        return narrow_buf, wide_buf, heads_buf


class _NativeLayerPass:
    def __init__(self, layers: NativeLayers, args: Sequence[PassArgs], alive: object) -> None:
        self._library = layers.kernels.library
        self._layers = layers
        self._args = args  # by layer
        self._alive = alive  # owners of the memory that `args` points to

    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        if isinstance(self._layers.layers[index].mlp, Moe):
            return self._through_experts(index, hidden_states)
        layer = self._layers.layer_args[index]
        self._library.baton_layer(layer, self._args[index], hidden_states.data_ptr())
        return hidden_states

    def _through_experts(self, index: int, hidden_states: Tensor) -> Tensor:
        layers, layer = self._layers, self._layers.layers[index]
        mlp_input = hidden_states if layer.mlp_norm is None else torch.empty_like(hidden_states)
        self._library.baton_layer_attention(
            layers.layer_args[index],
            self._args[index],
            hidden_states.data_ptr(),
            mlp_input.data_ptr(),
        )
        return add_mlp(layers.config, layers.ops, layer, hidden_states, mlp_input)

    def write(self, index: int, hidden_states: Tensor) -> None:
        hidden_states = hidden_states.contiguous()
        self._library.baton_layer_write_kv(
            self._layers.layer_args[index], self._args[index], hidden_states.data_ptr()
        )


def _layer_args(config: ModelConfig, index: int, layer: Layer, place: int) -> LayerArgs:
    own, mlp = config.layers[index], layer.mlp if isinstance(layer.mlp, Mlp) else None
    return LayerArgs(
        input_norm=norm_params(layer.input_norm),
        q_norm=norm_params(layer.q_norm),
        k_norm=norm_params(layer.k_norm),
        attention_norm=norm_params(layer.attention_norm),
        mlp_norm=norm_params(layer.mlp_norm),
        mlp_output_norm=norm_params(layer.mlp_output_norm),
        qkv=native_matrix(layer.qkv),
        output=native_matrix(layer.output),
        gate_up=native_matrix(mlp.gate_up) if mlp else PackedMatrix(),
        down=native_matrix(mlp.down) if mlp else PackedMatrix(),
        index=place,
        num_heads=config.num_heads,
        query_rope=own.query_rope,
        key_rope=own.key_rope,
        gate=gate_params(gate_of(config)),
        residual_scale=config.residual_scale,
        norms_all_heads=own.qk_norm is QkNorm.ALL_HEADS,
    )
