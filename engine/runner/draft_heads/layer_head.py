"""Draft head of one decoder layer over a model's hidden states: EAGLE, EAGLE-3 and MTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import CopiesInput, DecoderLayer, LayerInput, Tap
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.sampling.output_heads import HiddenStates

NEVER_DRAFTED = -1e30  # finite: logits that are not count as a failure


@dataclass(frozen=True, slots=True, eq=False)
class LayerHead:
    """Implements `DraftHead`. A norm that it lacks is None."""

    config: ModelConfig
    ops: Ops
    taps: JoinedTaps | None  # of the states that it reads; None: the model's last ones
    embed: Callable[[Tensor], Tensor]
    embedding_norm: Norm | None
    state_norm: Norm | None
    # Of embedding and state, for the layer's input. None: attention reads both of them, and the
    # layer adds its outputs to the state.
    projection: Linear | None
    layer: DecoderLayer
    norm: Norm | None  # of the output
    head: Callable[[Tensor], Tensor]
    adds_normed: bool = False  # the layer adds its outputs to the normed state
    feeds_back_normed: bool = False  # the next step gets the output after the norm
    has_first_embedding: bool = True  # False: that of the token after the first position is zero
    # False: its taps are at layers that compute all tokens in any case.
    needs_all_tokens: bool = True

    @property
    def reads_next_tokens(self) -> bool:
        return True

    def states_of(self, hidden_states: HiddenStates) -> Tensor:
        if self.taps is not None:
            return self.taps.states()
        assert hidden_states.by_token is not None
        return hidden_states.by_token

    def inputs_of(self, states: Tensor) -> Tensor:
        return states if self.taps is None else self.taps.project(states)

    def forward(
        self, token_ids: Tensor, states: Tensor | None, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        assert states is not None
        embeddings = self.embed(token_ids)
        if not self.has_first_embedding:
            embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        normed = self._normed(states, self.state_norm)
        both = torch.cat((self._normed(embeddings, self.embedding_norm), normed), dim=1)
        if self.projection is None:
            inputs = LayerInput(normed if self.adds_normed else states, both)
        else:
            inputs = LayerInput(self.projection(both))
        hidden, _ = self.layer.forward(forward_pass, inputs, None)
        return self._normed(hidden, self.norm) if self.feeds_back_normed else hidden

    def logits(self, states: Tensor) -> Tensor:
        return self.head(states if self.feeds_back_normed else self._normed(states, self.norm))

    def _normed(self, states: Tensor, norm: Norm | None) -> Tensor:
        return states if norm is None else self.ops.rms_norm(states, norm)


@dataclass(frozen=True, slots=True, eq=False)
class PartialHead:
    """LM head of a part of the vocabulary: other tokens are never drafted."""

    head: Linear
    token_ids: Tensor | None  # of its rows; None: all tokens
    vocab_size: int

    def __call__(self, states: Tensor) -> Tensor:
        logits = self.head(states).float()
        if self.token_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), NEVER_DRAFTED)
        spread[:, self.token_ids] = logits
        return spread


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
