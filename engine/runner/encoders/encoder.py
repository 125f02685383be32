"""Encoder: embeddings and layers over packed texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.ops import EncoderLayer, EncoderWeights, TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import PackedTexts
from baton.engine.runner.model.rope import Angles, Rope, rotate

LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Model weights and the forward pass. Holds no request state."""

    config: EncoderConfig
    ops: TorchEncoderOps
    weights: EncoderWeights
    layers: Sequence[EncodingLayer]
    ropes: tuple[Rope, ...]

    def forward(self, texts: PackedTexts, layer_done: LayerDone | None) -> Tensor:
        """Return the hidden states of all tokens, [tokens, hidden_size]."""
        positions = torch.from_numpy(texts.positions)
        angles = [rope.angles(positions, None, texts.max_len) for rope in self.ropes]
        hidden_states = self._embed(texts, positions)
        for index, layer in enumerate(self.layers):
            rope = self.config.layers[index].rope
            hidden_states = layer(hidden_states, texts, None if rope is None else angles[rope])
            if layer_done is not None:
                layer_done(index)
        norm = self.weights.final_norm
        return hidden_states if norm is None else self.ops.layer_norm(hidden_states, norm)

    def classify(self, vectors: Tensor) -> Tensor | None:
        """[texts, hidden_size] → logits, [texts, num_labels], in float32; None: no classifier."""
        config, weights = self.config.classifier, self.weights.classifier
        if config is None or weights is None:
            return None
        inner = functional.linear(vectors, weights.dense, weights.dense_bias)
        inner = torch.tanh(inner) if config.has_tanh else functional.gelu(inner)
        inner = inner if weights.norm is None else self.ops.layer_norm(inner, weights.norm)
        return functional.linear(inner, weights.labels, weights.labels_bias)

    def _embed(self, texts: PackedTexts, positions: Tensor) -> Tensor:
        tables = self.weights.embeddings
        embedded = tables.words.rows(torch.from_numpy(texts.token_ids))
        if tables.token_types is not None:
            types = torch.from_numpy(texts.token_types).clamp_max(len(tables.token_types) - 1)
            embedded = embedded + tables.token_types[types]
        if tables.positions is not None:
            embedded = embedded + tables.positions[positions + self.config.first_position]
        return self.ops.layer_norm(embedded, tables.norm)


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
