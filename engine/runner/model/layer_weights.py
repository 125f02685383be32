"""Weights of a decoder layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.runner.model.linear import HeadLinears, Linear, Mlp, Moe
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent.rule import RecurrentRule


@dataclass(frozen=True, slots=True)
class LatentProjections:
    """Weights of a layer that only latent attention has."""

    query: Linear | None  # from low-rank queries to those of all heads
    key: HeadLinears  # from unrotated queries into the latent space
    value: HeadLinears  # from the latent space to values


@dataclass(frozen=True, slots=True, eq=False)
class ParallelMoe:
    """Dense MLP and experts side by side, each between norms of its own."""

    dense: Mlp
    dense_norm: Norm
    dense_output_norm: Norm
    experts: Moe
    router_norm: Norm  # for the choice of experts
    experts_norm: Norm
    experts_output_norm: Norm
    expert_scales: Tensor  # [experts] in float32, of the weights of chosen experts


@dataclass(frozen=True, slots=True)
class Laurel:
    """Learned residual: a low-rank product of the layer's normed input, beside attention."""

    left: Linear
    right: Linear
    norm: Norm


AnyMlp = Mlp | Moe | ParallelMoe


@dataclass(frozen=True, slots=True)
class PerLayerWeights:
    """Weights of a layer that adds an input of its own: see `PerLayerInputs`."""

    gate: Linear
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class AltUpWeights:
    """Weights of a layer. Coefficients and scale are float32."""

    router: Linear
    router_norm: Norm
    prediction: Tensor  # [predicted streams, streams, outputs of the router]
    correction: Tensor  # [streams, outputs of the router]
    output_scale: Tensor | None  # of the computed stream before it gates the layer's own input


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a layer. A norm or MLP that it lacks is None."""

    input_norm: Norm | None
    # Rows of queries, then keys, then values, as far as the layer has them. With latent attention
    # rows of queries, which can be low-rank, then of the latent and of the rotated key. The norms
    # are those of the parts. With an output gate its rows come last. In a recurrent layer the rule
    # determines the rows.
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear
    attention_norm: Norm | None  # for the output of attention
    mlp_norm: Norm | None  # for the input of the MLP
    mlp: AnyMlp | None
    mlp_output_norm: Norm | None
    latent: LatentProjections | None = None
    recurrent: RecurrentRule | None = None
    # First projection of the rule in a layer that has attention, too. The columns of `output` are
    # then those of attention and of the rule.
    state_inputs: Linear | None = None
    v_norm: Norm | None = None
    per_layer: PerLayerWeights | None = None
    laurel: Laurel | None = None
    altup: AltUpWeights | None = None
    scale: float = 1.0  # of the layer's output

    @property
    def mixture(self) -> Moe | None:
        """Return the layer's experts."""
        if isinstance(self.mlp, ParallelMoe):
            return self.mlp.experts
        return self.mlp if isinstance(self.mlp, Moe) else None
