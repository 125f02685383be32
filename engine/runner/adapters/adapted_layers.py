"""Decoder layers that adapters can change. Passes without adapters use the layers as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from baton.engine.runner.adapters.adapters import ActiveAdapters
from baton.engine.runner.adapters.place import Place
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer, unfused_layers
from baton.engine.runner.model.linear import Linear, Mlp
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Ops


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """Implements `Linear`: the base's output, and what the tokens' adapters add to it."""

    base: Linear
    place: Place
    active: ActiveAdapters

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.active.add(self.place, hidden_states, self.base(hidden_states))

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.base.rows(row_ids)


@dataclass(frozen=True, slots=True)
class AdaptableLayer:
    """Implements `DecoderLayer` by the layer itself, or by one with adapted linear layers."""

    adds_low_rank: ClassVar[bool] = True
    plain: DecoderLayer
    adapted: DecoderLayer
    active: ActiveAdapters

    def forward(
        self, forward_pass: ForwardPass, hidden_states: Tensor, ends: Ends | None
    ) -> Tensor:
        if not forward_pass.groups:
            return self.plain.forward(forward_pass, hidden_states, ends)
        self.active.groups = forward_pass.groups
        # The groups are those of all tokens.
        hidden_states = self.adapted.forward(forward_pass, hidden_states, None)
        return hidden_states if ends is None else hidden_states[ends.indices]


def adaptable_layers(
    ops: Ops,
    config: ModelConfig,
    layers: Sequence[Layer],
    plain: Sequence[DecoderLayer],
    active: ActiveAdapters,
) -> Sequence[DecoderLayer]:
    """Return the layers `plain`, which can be changed by adapters from now on."""
    adapted = unfused_layers(
        ops, config, [_adapted(layer, index, active) for index, layer in enumerate(layers)]
    )
    return [
        own if own.adds_low_rank else AdaptableLayer(own, other, active)
        for own, other in zip(plain, adapted, strict=True)
    ]


def _adapted(layer: Layer, index: int, active: ActiveAdapters) -> Layer:
    def adapt(linear: Linear, name: str) -> Linear:
        return AdaptedLinear(linear, Place(index, name), active)

    if layer.recurrent is not None or layer.latent is not None:
        return layer
    mlp = layer.mlp
    if isinstance(mlp, Mlp):
        mlp = Mlp(adapt(mlp.gate_up, "gate_up"), adapt(mlp.down, "down"))
    return replace(
        layer, qkv=adapt(layer.qkv, "qkv"), output=adapt(layer.output, "output"), mlp=mlp
    )
