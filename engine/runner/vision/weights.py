"""Weights of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm

AnyNorm = LayerNorm | Norm


@dataclass(frozen=True, slots=True)
class ClippedLinears:
    """Implements `Linear` by the rows of several layers, each with bounds of inputs and outputs."""

    linears: Sequence[Linear]
    inputs: Sequence[Sequence[Tensor]]  # the least and the largest
    outputs: Sequence[Sequence[Tensor]]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        parts = zip(self.linears, self.inputs, self.outputs, strict=True)
        clipped = [
            linear(hidden_states.clamp(*its_input)).clamp_(*its_output)
            for linear, its_input, its_output in parts
        ]
        return clipped[0] if len(clipped) == 1 else torch.cat(clipped, dim=1)

    def rows(self, row_ids: Tensor) -> Tensor:
        raise TypeError("only the rows of an embedding are looked up")


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """Weights of a layer."""

    attention_norm: AnyNorm
    qkv: Linear  # rows of queries, then keys, then values
    head_norms: Sequence[AnyNorm]  # of queries, keys and values, head by head; or empty
    output: Linear
    output_norm: AnyNorm | None  # of what attention adds
    mlp_norm: AnyNorm
    up: Linear  # of a gated MLP rows of the gate, then of the other factor
    down: Linear
    down_norm: AnyNorm | None  # of what the MLP adds


@dataclass(frozen=True, slots=True)
class ProjectorWeights:
    norm: AnyNorm | None
    linears: Sequence[Linear]


@dataclass(frozen=True, slots=True)
class Standardization:
    """Bias, which is subtracted, and scale of each feature of a token, in float32."""

    bias: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class TowerWeights:
    pixel_norm: AnyNorm | None
    patches: Linear  # columns are the pixels of a patch: channels, then rows
    patch_norm: AnyNorm | None
    positions: Tensor | None
    input_norm: AnyNorm | None
    layers: Sequence[TowerLayer]
    final_norm: AnyNorm | None
    standardization: Standardization | None
    projector: ProjectorWeights
    level_projectors: Sequence[ProjectorWeights]
