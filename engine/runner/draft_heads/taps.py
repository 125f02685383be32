"""Taps: copies of the hidden states that enter some layers of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.model.layers import DecoderLayer, LayerInput
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Norm, Ops


class Taps:
    """States of the pass that was launched last, by tap."""

    def __init__(self, num_taps: int) -> None:
        self._states: list[Tensor | None] = [None] * num_taps

    @property
    def states(self) -> Sequence[Tensor]:
        """Return the states, each [tokens, hidden_size]."""
        return [states for states in self._states if states is not None]

    def put(self, number: int, states: Tensor) -> None:
        self._states[number] = states.clone()


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTaps:
    """States of all taps, side by side, and their projection to one state."""

    ops: Ops
    taps: Taps
    norms: Sequence[Norm]  # of the state of each tap, if there are any
    joined_norm: Norm | None
    projection: Linear

    def states(self) -> Tensor:
        return torch.cat(list(self.taps.states), dim=1)

    def project(self, states: Tensor) -> Tensor:
        if self.norms:
            pairs = zip(states.chunk(len(self.norms), dim=1), self.norms, strict=True)
            states = torch.cat([self.ops.rms_norm(part, norm) for part, norm in pairs], dim=1)
        if self.joined_norm is not None:
            states = self.ops.rms_norm(states, self.joined_norm)
        return self.projection(states)


@dataclass(frozen=True, slots=True)
class TappedLayer:
    """Implements `DecoderLayer`: copies its input, and is otherwise the layer itself."""

    layer: DecoderLayer
    taps: Taps
    number: int

    @property
    def adds_low_rank(self) -> bool:
        return self.layer.adds_low_rank

    @property
    def extends_output(self) -> bool:
        return self.layer.extends_output

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        self.taps.put(self.number, inputs.hidden_states)
        return self.layer.forward(forward_pass, inputs, ends)

    def joined(self, after: DecoderLayer) -> TappedLayer | None:
        both = self.layer.joined(after)
        return None if both is None else TappedLayer(both, self.taps, self.number)


def tap_layers(
    layers: Sequence[DecoderLayer], indices: Sequence[int], taps: Taps
) -> list[DecoderLayer]:
    """Return the layers, of which those with these indices are tapped."""
    tapped = list(layers)
    for number, index in enumerate(indices):
        tapped[index] = TappedLayer(tapped[index], taps, number)
    return tapped
