"""Inputs that each layer has of its own for each token, and what a layer does at its end.

Gemma 3n and 4 look up a vector per token and layer, add a projection of the embedding to it, and
gate it into the output of the layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer, PerLayerWeights
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, UnfusedLayer, gate_of
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import MlpGate, Norm, Ops


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Computes the inputs of all layers, once per pass."""

    ops: Ops
    num_layers: int
    embedding: Linear  # the rows of a token are those of all layers, one after the other
    projection: Linear  # of a token's embedding, likewise
    norm: Norm  # of the projection, layer by layer
    placeholder_id: int
    num_rows: int | None = None  # if tokens from this one on have the rows of token 0

    def compute(self, token_ids: Tensor, embeddings: Tensor, given: Tensor | None) -> Tensor:
        """Return [tokens, layers, size].

        The placeholder is looked up for the tokens at the indices `given`, whose embeddings are
        those of pictures.
        """
        if given is not None:
            token_ids = token_ids.index_fill(0, given, self.placeholder_id)
        if self.num_rows is not None:
            token_ids = token_ids.where(token_ids < self.num_rows, 0)
        projected = self.projection(embeddings) * embeddings.shape[1] ** -0.5
        by_layer = projected.view(len(token_ids) * self.num_layers, -1)
        normed = self.ops.rms_norm(by_layer, self.norm)
        looked_up = self.embedding.rows(token_ids).view(normed.shape)
        scale = torch.tensor(math.sqrt(normed.shape[1]), dtype=normed.dtype)
        mixed = (normed + looked_up * scale) * 2**-0.5
        return mixed.view(len(token_ids), self.num_layers, -1)


@dataclass(frozen=True, slots=True)
class ExtendedLayer:
    """Implements `DecoderLayer`: adds the layer's own input to its output, and scales it."""

    extends_output: ClassVar[bool] = True
    layer: DecoderLayer
    index: int
    ops: Ops
    gate: MlpGate
    weights: PerLayerWeights | None
    scale: float

    @property
    def adds_low_rank(self) -> bool:
        return self.layer.adds_low_rank

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        hidden_states = self.layer.forward(forward_pass, inputs, ends).hidden_states
        if self.weights is not None and len(hidden_states):
            own = forward_pass.per_layer_inputs
            assert own is not None
            own = own[:, self.index] if ends is None else own[ends.indices, self.index]
            added = gate_own_input(self.ops, self.gate, self.weights, hidden_states, own)
            hidden_states = self.ops.add(hidden_states, added, 1.0)
        return LayerInput(hidden_states if self.scale == 1.0 else hidden_states * self.scale)

    def joined(self, after: DecoderLayer) -> None:
        return None


def gate_own_input(
    ops: Ops, gate: MlpGate, weights: PerLayerWeights, hidden_states: Tensor, own: Tensor
) -> Tensor:
    """Return what a layer adds to its output: its own input, gated by the hidden states."""
    gated = ops.apply_gate(torch.cat((weights.gate(hidden_states), own), dim=1), gate)
    return ops.rms_norm(weights.projection(gated), weights.norm)


def extend_layers(
    config: ModelConfig, ops: Ops, layers: Sequence[Layer], made: Sequence[DecoderLayer]
) -> Sequence[DecoderLayer]:
    """Return layers with inputs of their own or a scale, if the model has them."""
    if config.per_layer is None and not config.has_layer_scale:
        return made
    return [
        own
        if own.extends_output
        else ExtendedLayer(alone(own), index, ops, gate_of(config), layer.per_layer, layer.scale)
        for index, (own, layer) in enumerate(zip(made, layers, strict=True))
    ]


def alone(layer: DecoderLayer) -> DecoderLayer:
    """Return a layer that does not compute the norm of the next one: its output changes first."""
    return replace(layer, next_norm=None) if isinstance(layer, UnfusedLayer) else layer
