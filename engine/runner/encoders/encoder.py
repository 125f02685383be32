"""Encoder: embeddings and layers over packed texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.ops import EncoderOps
from baton.engine.runner.encoders.packed_texts import PackedTexts
from baton.engine.runner.encoders.weights import EncoderLayer, EncoderWeights
from baton.engine.runner.model.rope import Angles, Rope, rotate

LayerDone = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Model weights and the forward pass. Holds no request state."""

    config: EncoderConfig
    ops: EncoderOps
    weights: EncoderWeights
    ropes: tuple[Rope, ...]

    def forward(self, texts: PackedTexts, layer_done: LayerDone) -> Tensor:
        """Return the hidden states of all tokens, [tokens, hidden_size]."""
        positions = torch.from_numpy(texts.positions)
        angles = [rope.angles(positions, None, texts.max_len) for rope in self.ropes]
        hidden_states = self._embed(texts, positions)
        for index, layer in enumerate(self.weights.layers):
            rope = self.config.layers[index].rope
            own = None if rope is None else angles[rope]
            hidden_states = self._layer(index, layer, hidden_states, texts, own)
            layer_done(index)
        norm = self.weights.final_norm
        return hidden_states if norm is None else self.ops.layer_norm(hidden_states, norm)

    def _embed(self, texts: PackedTexts, positions: Tensor) -> Tensor:
        tables = self.weights.embeddings
        embedded = tables.words.rows(torch.from_numpy(texts.token_ids))
        if tables.token_types is not None:
            types = torch.from_numpy(texts.token_types).clamp_max(len(tables.token_types) - 1)
            embedded = embedded + tables.token_types[types]
        if tables.positions is not None:
            embedded = embedded + tables.positions[positions + self.config.first_position]
        return self.ops.layer_norm(embedded, tables.norm)

    def _layer(
        self,
        index: int,
        layer: EncoderLayer,
        hidden_states: Tensor,
        texts: PackedTexts,
        angles: Angles | None,
    ) -> Tensor:
        ops, norm, is_pre_norm = self.ops, layer.attention_norm, self.config.is_pre_norm
        inputs = hidden_states
        if is_pre_norm and norm is not None:
            inputs = ops.layer_norm(hidden_states, norm)
        hidden_states = hidden_states + self._mix(index, layer, inputs, texts, angles)
        if is_pre_norm:
            inputs = ops.layer_norm(hidden_states, layer.mlp_norm)
            return hidden_states + self._mlp(layer, inputs)
        if norm is not None:
            hidden_states = ops.layer_norm(hidden_states, norm)
        return ops.layer_norm(hidden_states + self._mlp(layer, hidden_states), layer.mlp_norm)

    def _mix(
        self,
        index: int,
        layer: EncoderLayer,
        inputs: Tensor,
        texts: PackedTexts,
        angles: Angles | None,
    ) -> Tensor:
        config, qkv = self.config, layer.qkv(inputs)
        if angles is not None:
            rotated = qkv.view(len(qkv), 3 * config.num_heads, config.head_dim)
            heads = rotated[:, : 2 * config.num_heads]
            rotated[:, : 2 * config.num_heads] = rotate(heads, *angles)
        window = config.layers[index].window
        return layer.output(self.ops.attend(qkv, config.num_heads, texts.groups, window))

    def _mlp(self, layer: EncoderLayer, inputs: Tensor) -> Tensor:
        function = self.ops.gated_gelu if self.config.is_gated else self.ops.gelu
        return layer.down(function(layer.up(inputs), self.config.gelu))
