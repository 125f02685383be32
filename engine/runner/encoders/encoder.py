"""Encoder: embeddings and layers over packed texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.encoders.config import EncoderConfig
from baton.engine.runner.encoders.layer import EncodingLayer
from baton.engine.runner.encoders.ops import TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import PackedTexts
from baton.engine.runner.encoders.weights import EncoderWeights
from baton.engine.runner.model.rope import Rope

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
