"""Weights of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm

AnyNorm = LayerNorm | Norm


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """Weights of a layer."""

    attention_norm: AnyNorm
    qkv: Linear  # rows of queries, then keys, then values
    output: Linear
    mlp_norm: AnyNorm
    up: Linear  # of a gated MLP rows of the gate, then of the other factor
    down: Linear


@dataclass(frozen=True, slots=True)
class ProjectorWeights:
    norm: AnyNorm | None
    linears: Sequence[Linear]


@dataclass(frozen=True, slots=True)
class TowerWeights:
    patches: Linear  # columns are the pixels of a patch: channels, then rows
    positions: Tensor | None
    input_norm: AnyNorm | None
    layers: Sequence[TowerLayer]
    final_norm: AnyNorm | None
    projector: ProjectorWeights
    level_projectors: Sequence[ProjectorWeights]
