"""The decoder family: Llama, Mistral, Qwen2 and Qwen3 differ in a few switches only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.runner.attention import AttentionPass
from engine.runner.config import ModelConfig
from engine.runner.facts import PassHook
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


class Decoder:
    """The weights and the pass over them; holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Linear,
        layers: list[Layer],
        norm: Tensor,
        head: Linear,
    ) -> None:
        self._config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(
        self,
        token_ids: Tensor,
        angles: Angles,
        attention: AttentionPass,
        hook: PassHook | None,
    ) -> Tensor:
        """[tokens] → [tokens, hidden_size], normed and ready for `logits`."""
        states = self._embedding.rows(token_ids)
        for index, layer in enumerate(self._layers):
            states = states + self._attend(index, layer, states, angles, attention)
            states = states + self._transform(layer, states)
            if hook is not None:
                hook.layer_done(index)
        if hook is not None:
            hook.pass_done()
        return self._normed(states, self._norm)

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        return self._head(states).float()

    def _attend(
        self,
        index: int,
        layer: Layer,
        states: Tensor,
        angles: Angles,
        attention: AttentionPass,
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
