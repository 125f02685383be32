"""Classifier of pooled texts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.encoders.config import ClassifierConfig
from baton.engine.runner.encoders.weights import ClassifierWeights


def compute_logits(config: ClassifierConfig, weights: ClassifierWeights, vectors: Tensor) -> Tensor:
    """[texts, hidden_size] → [texts, num_labels], all in float32."""
    inner = functional.linear(vectors, weights.dense, weights.dense_bias)
    inner = torch.tanh(inner) if config.has_tanh else functional.gelu(inner)
    norm = weights.norm
    if norm is not None:
        inner = functional.layer_norm(inner, inner.shape[-1:], norm.weight, norm.bias, norm.epsilon)
    return functional.linear(inner, weights.labels, weights.labels_bias)
