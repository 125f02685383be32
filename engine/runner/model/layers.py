"""Decoder layers: the Protocol of fused kernels and the reference, operation by operation.

Llama, Mistral, Qwen2 and Qwen3 differ only in a few switches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass
from engine.runner.model.config import ModelConfig
from engine.runner.model.ops import Angles, Linear, Ops


@dataclass(frozen=True, slots=True)
class Layer:
    input_norm: Tensor
    qkv: Linear  # rows of queries, then keys, then values
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


class LayerPass(Protocol):
    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        """Compute a layer. The input can be overwritten: do not use it after the call."""
        ...

    def write(self, index: int, hidden_states: Tensor) -> None:
        """Compute only the layer's keys and values and write them into their blocks."""
        ...


class Layers(Protocol):
    def begin(self, angles: Angles, attention: AttentionPass) -> LayerPass:
        """Begin a forward pass over the tokens of `angles`."""
        ...


class UnfusedLayers:
    """Reference implementation: one operation of `Ops` after the other."""

    def __init__(self, config: ModelConfig, ops: Ops, layers: Sequence[Layer]) -> None:
        self._config = config
        self._ops = ops
        self._layers = layers

    def begin(self, angles: Angles, attention: AttentionPass) -> LayerPass:
        return _PlainPass(self._config, self._ops, self._layers, angles, attention)


class _PlainPass:
    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        layers: Sequence[Layer],
        angles: Angles,
        attention: AttentionPass,
    ) -> None:
        self._config = config
        self._ops = ops
        self._layers = layers
        self._angles = angles
        self._attention = attention

    def through(self, index: int, hidden_states: Tensor) -> Tensor:
        layer = self._layers[index]
        query = self._write(index, layer, hidden_states)
        query = self._apply_rope(query, layer.q_norm)
        hidden_states = hidden_states + layer.output(
            self._attention.attend(index, query).flatten(1)
        )
        return hidden_states + self._mlp(layer, hidden_states)

    def write(self, index: int, hidden_states: Tensor) -> None:
        self._write(index, self._layers[index], hidden_states)

    def _write(self, index: int, layer: Layer, hidden_states: Tensor) -> Tensor:
        """Write the layer's keys and values; return the queries before rotation."""
        config = self._config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = layer.qkv(self._rms_norm(hidden_states, layer.input_norm))
        split: tuple[Tensor, ...] = qkv.view(len(hidden_states), -1, config.head_dim).split(
            heads, dim=1
        )
        query, key, value = split
        self._attention.write(index, self._apply_rope(key, layer.k_norm), value)
        return query

    def _apply_rope(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        return self._ops.apply_rope(heads, norm, self._config.rms_norm_eps, self._angles)

    def _mlp(self, layer: Layer, hidden_states: Tensor) -> Tensor:
        gate_up = layer.gate_up(self._rms_norm(hidden_states, layer.post_norm))
        return layer.down(self._ops.silu_and_mul(gate_up))

    def _rms_norm(self, hidden_states: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(hidden_states, weight, self._config.rms_norm_eps)
