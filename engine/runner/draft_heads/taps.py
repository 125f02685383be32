"""Taps: copies of the hidden states that enter some layers of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.engine.runner.model.layers import CopiesInput, DecoderLayer, LayerInput, Tap
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Norm, Ops


class Taps:
    """States of the pass that was launched last."""

    def __init__(self, num_taps: int) -> None:
        self._num_taps = num_taps
        self._joined: Tensor | None = None
        self._written: set[int] = set()

    @property
    def joined(self) -> Tensor:
        """Return the states of all taps side by side: [tokens, taps x hidden_size]."""
        assert self._joined is not None
        return self._joined

    def rows_for(self, number: int, hidden_states: Tensor) -> Tensor:
        """Return the place for the states of a tap."""
        num_tokens, size = hidden_states.shape
        if self._joined is None or number in self._written:  # a new pass
            self._joined = hidden_states.new_empty(num_tokens, self._num_taps * size)
            self._written.clear()
        self._written.add(number)
        return self._joined[:, number * size : (number + 1) * size]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedTaps:
    """States of all taps, side by side, and their projection to one state."""

    ops: Ops
    taps: Taps
    norms: Sequence[Norm]  # of the state of each tap, if there are any
    joined_norm: Norm | None
    projection: Linear

    def states(self) -> Tensor:
        return self.taps.joined

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
    tap: Tap

    @property
    def adds_low_rank(self) -> bool:
        return self.layer.adds_low_rank

    @property
    def extends_output(self) -> bool:
        return self.layer.extends_output

    def forward(
        self, forward_pass: ForwardPass, inputs: LayerInput, ends: Ends | None
    ) -> LayerInput:
        self.tap(inputs.hidden_states).copy_(inputs.hidden_states)
        return self.layer.forward(forward_pass, inputs, ends)

    def joined(self, after: DecoderLayer) -> TappedLayer | None:
        both = self.layer.joined(after)
        return None if both is None else TappedLayer(both, self.tap)


def tap_layers(
    layers: Sequence[DecoderLayer], indices: Sequence[int], taps: Taps
) -> list[DecoderLayer]:
    """Return the layers, of which those with these indices are tapped."""
    tapped = list(layers)
    for number, index in enumerate(indices):
        layer, tap = tapped[index], partial(taps.rows_for, number)
        copying = layer.copying_to(tap) if isinstance(layer, CopiesInput) else None
        tapped[index] = copying or TappedLayer(layer, tap)
    return tapped
