"""A decoder's layers: the Protocol that kernels keep to, and the way through them part by part.

Llama, Mistral, Qwen2 and Qwen3 differ in a few switches only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runner.attention import AttentionPass
from engine.runner.config import ModelConfig
from engine.runner.ops import Angles, Linear, Ops


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
    def through(self, index: int, states: Tensor) -> Tensor:
        """The states before a layer are given away, and become those after it."""
        ...

    def write(self, index: int, states: Tensor) -> None:
        """Only what later tokens need of a layer: keys and values, into their blocks."""
        ...


class Layers(Protocol):
    def begin(self, angles: Angles, attention: AttentionPass) -> LayerPass:
        """One forward pass; `angles` are those of its tokens."""
        ...


class PlainLayers:
    """The reference: one part after the other, as the ops compute them."""

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

    def through(self, index: int, states: Tensor) -> Tensor:
        layer = self._layers[index]
        query = self._write(index, layer, states)
        query = self._rotated(query, layer.q_norm)
        states = states + layer.output(self._attention.attend(index, query).flatten(1))
        return states + self._transform(layer, states)

    def write(self, index: int, states: Tensor) -> None:
        self._write(index, self._layers[index], states)

    def _write(self, index: int, layer: Layer, states: Tensor) -> Tensor:
        """Answers the queries, not rotated yet."""
        config = self._config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        mixed = layer.qkv(self._normed(states, layer.input_norm))
        split: tuple[Tensor, ...] = mixed.view(len(states), -1, config.head_dim).split(heads, dim=1)
        query, key, value = split
        self._attention.write(index, self._rotated(key, layer.k_norm), value)
        return query

    def _rotated(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        return self._ops.rotated(heads, norm, self._config.rms_norm_eps, self._angles)

    def _transform(self, layer: Layer, states: Tensor) -> Tensor:
        both = layer.gate_up(self._normed(states, layer.post_norm))
        return layer.down(self._ops.gated(both))

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return self._ops.normed(states, weight, self._config.rms_norm_eps)
