"""Weights of an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear


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
