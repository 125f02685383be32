"""Decoder layers: the Protocol of fused kernels and the reference, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.engine.runner.attention.paged_attention import AttentionPass
from baton.engine.runner.model.config import LatentConfig, ModelConfig, QkNorm
from baton.engine.runner.model.experts import Mlp, Moe
from baton.engine.runner.model.latent import (
    LatentProjections,
    latent_key,
    latent_query,
    split_latent,
)
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mlp import compute_mlp, compute_moe
from baton.engine.runner.model.ops import MlpGate, Norm, Ops
from baton.engine.runner.model.recurrent import RecurrentWeights
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.state.linear_attention import LinearAttentionPass


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer. A norm that the model lacks is None."""

    input_norm: Norm | None
    # Rows of queries, then keys, then values. With latent attention rows of queries, which can be
    # low-rank, then of the latent and of the rotated key. The norms are those of the parts. With an
    # output gate its rows come last. Linear attention has the same rows without rotation and norms.
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    attention_norm: Norm | None  # of the output of attention
    mlp_norm: Norm | None  # of the input of the MLP
    mlp: Mlp | Moe
    mlp_output_norm: Norm | None
    latent: LatentProjections | None = None
    recurrent: RecurrentWeights | None = None


class LayerPass(Protocol):
    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        """Compute a layer. The input can be overwritten: do not use it after the call."""
        ...

    def write(self, index: int, hidden_states: Tensor) -> None:
        """Compute only the layer's keys and values and write them into their blocks.

        Not for recurrent layers.
        """
        ...


class Layers(Protocol):
    def begin(
        self,
        angles: Sequence[Angles],
        attention: AttentionPass,
        linear_attention: LinearAttentionPass | None = None,
    ) -> LayerPass:
        """Begin a forward pass over the tokens of `angles`, one pair for each RoPE."""
        ...


def gate_of(config: ModelConfig) -> MlpGate:
    return MlpGate(config.activation, config.swiglu_alpha, config.swiglu_limit)


def add_mlp(
    config: ModelConfig, ops: Ops, layer: Layer, hidden_states: Tensor, mlp_input: Tensor
) -> Tensor:
    """Return `hidden_states` plus the output of the layer's MLP or experts for `mlp_input`."""
    gate = gate_of(config)
    if isinstance(layer.mlp, Moe):
        output = compute_moe(ops, layer.mlp, gate, mlp_input)
    else:
        output = compute_mlp(ops, layer.mlp, gate, mlp_input)
    return _add(config, ops, hidden_states, output, layer.mlp_output_norm)


def _add(
    config: ModelConfig, ops: Ops, hidden_states: Tensor, output: Tensor, norm: Norm | None
) -> Tensor:
    """Return `hidden_states` plus the norm of an output, scaled."""
    return ops.add(hidden_states, _apply_norm(ops, output, norm), config.residual_scale)


def _apply_norm(ops: Ops, hidden_states: Tensor, norm: Norm | None) -> Tensor:
    return hidden_states if norm is None else ops.rms_norm(hidden_states, norm)


class UnfusedLayers:
    """Reference implementation: one operation of `Ops` after the other."""

    def __init__(self, config: ModelConfig, ops: Ops, layers: Sequence[Layer]) -> None:
        self._config = config
        self._ops = ops
        self._layers = layers
        kinds = (config.attention_layers, config.recurrent_layers)
        self._numbers = {layer: i for kind in kinds for i, layer in enumerate(kind)}

    def begin(
        self,
        angles: Sequence[Angles],
        attention: AttentionPass,
        linear_attention: LinearAttentionPass | None = None,
    ) -> LayerPass:
        return _PlainPass(
            self._config,
            self._ops,
            self._layers,
            self._numbers,
            angles,
            attention,
            linear_attention,
        )


class _PlainPass:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        layers: Sequence[Layer],
        numbers: Mapping[int, int],
        angles: Sequence[Angles],
        attention: AttentionPass,
        linear_attention: LinearAttentionPass | None,
    ) -> None:
        self._config = config
        self._ops = ops
        self._layers = layers
        self._numbers = numbers  # of each layer among those with attention, or the recurrent ones
        self._angles = angles
        self._attention = attention
        self._linear_attention = linear_attention

    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        layer, config, ops = self._layers[index], self._config, self._ops
        mix = self._attend if layer.recurrent is None else self._mix
        output = layer.output(mix(index, layer, hidden_states))
        hidden_states = _add(config, ops, hidden_states, output, layer.attention_norm)
        mlp_input = _apply_norm(ops, hidden_states, layer.mlp_norm)
        return add_mlp(config, ops, layer, hidden_states, mlp_input)

    def write(self, index: int, hidden_states: Tensor) -> None:
        self._write(index, self._layers[index], hidden_states)

    def _mix(self, index: int, layer: Layer, hidden_states: Tensor) -> Tensor:
        """Return the output of a recurrent layer, before its last projection."""
        assert layer.recurrent is not None
        assert self._linear_attention is not None
        inputs = _apply_norm(self._ops, hidden_states, layer.input_norm)
        gates = layer.recurrent.gates(inputs)
        number = self._numbers[index]
        return self._linear_attention.mix(number, layer.recurrent, layer.qkv(inputs), gates)

    def _attend(self, index: int, layer: Layer, hidden_states: Tensor) -> Tensor:
        """Return the output of attention, before its last projection."""
        query, gate = self._write(index, layer, hidden_states)
        query = self._query(index, layer, query)
        attended = self._attention.attend(self._numbers[index], query)
        if layer.latent is not None:
            attended = layer.latent.value(attended)
        attended = attended.flatten(1)
        return attended if gate is None else self._ops.multiply_sigmoid(attended, gate.flatten(1))

    def _write(
        self, index: int, layer: Layer, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Write keys and values; return queries before norm and rotation, and output gates."""
        config = self._config
        if config.latent is not None:
            return self._write_latent(config.latent, index, layer, hidden_states), None
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        if config.has_output_gate:
            heads.append(config.num_heads)
        qkv = layer.qkv(_apply_norm(self._ops, hidden_states, layer.input_norm))
        split: tuple[Tensor, ...] = qkv.view(len(hidden_states), -1, config.head_dim).split(
            heads, dim=1
        )
        query, key, value, *gates = split
        rope = config.layers[index].key_rope
        key = self._apply_rope(index, key, layer.k_norm, rope)
        self._attention.write(self._numbers[index], key, value)
        return query, gates[0] if gates else None

    def _write_latent(
        self, latent: LatentConfig, index: int, layer: Layer, hidden_states: Tensor
    ) -> Tensor:
        projected = layer.qkv(_apply_norm(self._ops, hidden_states, layer.input_norm))
        query, values, key = split_latent(latent, projected)
        angles = self._angles[self._config.layers[index].key_rope]
        key = latent_key(self._ops, values, key, layer.k_norm, angles)
        self._attention.write(self._numbers[index], key, None)
        return query

    def _query(self, index: int, layer: Layer, query: Tensor) -> Tensor:
        """Return the queries after norm and rotation."""
        rope, latent = self._config.layers[index].query_rope, self._config.latent
        if latent is None or layer.latent is None:
            return self._apply_rope(index, query, layer.q_norm, rope)
        return latent_query(
            latent, self._ops, layer.latent, query, layer.q_norm, self._angles[rope]
        )

    def _apply_rope(self, index: int, heads: Tensor, norm: Norm | None, rope: int) -> Tensor:
        if norm is not None and self._config.layers[index].qk_norm is QkNorm.ALL_HEADS:
            heads = self._ops.rms_norm(heads.flatten(1), norm).view(heads.shape)
            norm = None
        return self._ops.apply_rope(heads, norm, self._angles[rope])
