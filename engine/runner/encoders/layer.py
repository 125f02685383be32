"""Layer of an encoder: the Protocol of its implementations, and the one that calls operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.ops import TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import PackedTexts
from baton.engine.runner.encoders.weights import EncoderLayer
from baton.engine.runner.model.rope import Angles, rotate


class EncodingLayer(Protocol):
    """Attention and MLP of one layer."""

    def __call__(self, hidden_states: Tensor, texts: PackedTexts, angles: Angles | None) -> Tensor:
        """Return the output, [tokens, hidden_size]. The input may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class UnfusedEncoderLayer:
    """Implements `EncodingLayer` with a call for each operation."""

    config: EncoderConfig
    index: int
    ops: TorchEncoderOps
    weights: EncoderLayer

    def __call__(self, hidden_states: Tensor, texts: PackedTexts, angles: Angles | None) -> Tensor:
        ops, weights, is_pre_norm = self.ops, self.weights, self.config.is_pre_norm
        inputs, norm = hidden_states, weights.attention_norm
        if is_pre_norm and norm is not None:
            inputs = ops.layer_norm(hidden_states, norm)
        hidden_states = hidden_states + self._mix(inputs, texts, angles)
        if is_pre_norm:
            inputs = ops.layer_norm(hidden_states, weights.mlp_norm)
            return hidden_states + self._mlp(inputs)
        if norm is not None:
            hidden_states = ops.layer_norm(hidden_states, norm)
        return ops.layer_norm(hidden_states + self._mlp(hidden_states), weights.mlp_norm)

    def _mix(self, inputs: Tensor, texts: PackedTexts, angles: Angles | None) -> Tensor:
        config, qkv = self.config, self.weights.qkv(inputs)
        if angles is not None:
            rotated = qkv.view(len(qkv), 3 * config.num_heads, config.head_dim)
            heads = rotated[:, : 2 * config.num_heads]
            rotated[:, : 2 * config.num_heads] = rotate(heads, *angles)
        window = config.layers[self.index].window
        mixed = self.ops.attend(qkv, config.num_heads, texts.groups, window)
        return self.weights.output(mixed)

    def _mlp(self, inputs: Tensor) -> Tensor:
        function = self.ops.gated_gelu if self.config.is_gated else self.ops.gelu
        return self.weights.down(function(self.weights.up(inputs), self.config.gelu))
