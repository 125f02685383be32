"""A decoder's layers: the Protocol that kernels keep to, and the way through them part by part.

Llama, Mistral, Qwen2 and Qwen3 differ in a few switches only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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


# A layer's index and the states before it: those after it. The states before it are given away.
LayerPass: TypeAlias = Callable[[int, Tensor], Tensor]


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
        def through(index: int, states: Tensor) -> Tensor:
            layer = self._layers[index]
            states = states + self._attend(index, layer, states, angles, attention)
            return states + self._transform(layer, states)

        return through

    def _attend(
        self, index: int, layer: Layer, states: Tensor, angles: Angles, attention: AttentionPass
    ) -> Tensor:
        config, epsilon = self._config, self._config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        mixed = layer.qkv(self._normed(states, layer.input_norm))
        split = mixed.view(len(states), -1, config.head_dim).split(heads, dim=1)
        query, key, value = split
        query = self._ops.rotated(query, layer.q_norm, epsilon, angles)
        key = self._ops.rotated(key, layer.k_norm, epsilon, angles)
        return layer.output(attention.attend(index, query, key, value).flatten(1))

    def _transform(self, layer: Layer, states: Tensor) -> Tensor:
        both = layer.gate_up(self._normed(states, layer.post_norm))
        return layer.down(self._ops.gated(both))

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        return self._ops.normed(states, weight, self._config.rms_norm_eps)
