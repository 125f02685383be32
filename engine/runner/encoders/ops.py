"""Weights of an encoder, and its operations in plain torch, from which others are derived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.encoders.config import Gelu
from baton.engine.runner.encoders.packed_texts import EqualTexts
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear

MIN_QUERIES = 64  # that are computed together where attention has a window


class TorchEncoderOps:
    """Operations on packed texts. Each rounds to the dtype of its input."""

    def layer_norm(self, hidden_states: Tensor, norm: LayerNorm) -> Tensor:
        """Layer norm of [tokens, size]."""
        return norm(hidden_states)

    def gelu(self, inputs: Tensor, kind: Gelu) -> Tensor:
        return functional.gelu(inputs, approximate="none" if kind is Gelu.EXACT else "tanh")

    def gated_gelu(self, inputs: Tensor, kind: Gelu) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: function of the first half times the second."""
        first, factor = inputs.chunk(2, dim=-1)
        return self.gelu(first, kind) * factor

    def attend(
        self, qkv: Tensor, num_heads: int, groups: Sequence[EqualTexts], window: int | None
    ) -> Tensor:
        """Attention of each token to its text, or to so many tokens before and after it.

        [tokens, 3 * size] → [tokens, size]; queries, then keys, then values, head by head.
        """
        size = qkv.shape[1] // 3
        output = torch.empty(len(qkv), size, dtype=qkv.dtype, device=qkv.device)
        for group in groups:
            texts = slice(group.first, group.end)
            # [texts, tokens, 3, heads, head_dim] → [3, texts, heads, tokens, head_dim]
            parts = qkv[texts].view(group.num_texts, group.num_tokens, 3, num_heads, -1)
            query, key, value = parts.permute(2, 0, 3, 1, 4)
            mixed = _attend(query, key, value, window)
            output[texts] = mixed.transpose(1, 2).reshape(-1, size)
        return output


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    num_tokens = query.shape[2]
    if window is None or window >= num_tokens - 1:
        return functional.scaled_dot_product_attention(query, key, value)
    outputs, step = [], max(MIN_QUERIES, window)
    for first in range(0, num_tokens, step):
        queries = range(first, min(first + step, num_tokens))
        seen = range(max(0, first - window), min(queries.stop + window, num_tokens))
        positions = torch.arange(seen.start, seen.stop, device=query.device)
        distances = positions - positions[queries.start - seen.start :][: len(queries), None]
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, queries.start : queries.stop],
                key[:, :, seen.start : seen.stop],
                value[:, :, seen.start : seen.stop],
                attn_mask=distances.abs() <= window,
            )
        )
    return torch.cat(outputs, dim=2)


@dataclass(frozen=True, slots=True)
class EmbeddingTables:
    words: Linear
    positions: Tensor | None
    token_types: Tensor | None
    norm: LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Weights of a layer."""

    attention_norm: LayerNorm | None
    qkv: Linear  # rows of queries, then keys, then values
    output: Linear
    mlp_norm: LayerNorm
    up: Linear  # with a gated MLP rows of the function's input, then of the other factor
    down: Linear


@dataclass(frozen=True, slots=True)
class ClassifierWeights:
    """Head of a classifier, in float32."""

    dense: Tensor
    dense_bias: Tensor | None
    norm: LayerNorm | None
    labels: Tensor
    labels_bias: Tensor


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    embeddings: EmbeddingTables
    layers: Sequence[EncoderLayer]
    final_norm: LayerNorm | None
    classifier: ClassifierWeights | None
