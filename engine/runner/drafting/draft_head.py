"""Draft head: predicts the tokens after the next one from a model's hidden states.

Its input at a position is the model's state of that position and the embedding of the token after
it, and its output predicts the token after that. It goes on from its own states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from baton.engine.runner.drafting.taps import Taps
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import DecoderLayer, LayerInput
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import ForwardPass
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.sampling.output_heads import HiddenStates

NEVER_DRAFTED = -1e30  # finite: logits that are not count as a failure


class DraftHead(Protocol):
    """Weights of a head. Holds no request state."""

    @property
    def config(self) -> ModelConfig:
        """Return the configuration of its layer."""
        ...

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether it reads the model's last hidden states of all tokens."""
        ...

    def states_of(self, hidden_states: HiddenStates) -> Tensor:
        """Return the inputs of a pass over the tokens that the model has just computed."""
        ...

    def forward(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Compute the layer, which writes its KV, and return the states of the next step.

        The given ones can be overwritten.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return what states predict: [rows, hidden_size] → [rows, vocab_size] in float32."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Eagle3Head:
    """Implements `DraftHead` by the hidden states of three layers, joined and projected."""

    config: ModelConfig
    ops: Ops
    taps: Taps
    taps_norm: Norm | None  # of the joined states
    tap_norms: Sequence[Norm]  # of the state of each layer
    projection: Linear
    embedding: Linear
    embedding_norm: Norm
    state_norm: Norm
    layer: DecoderLayer
    norm: Norm
    head: Linear
    drafted_ids: Tensor | None  # of the rows of the head; None: all tokens
    adds_normed: bool
    feeds_back_normed: bool

    @property
    def needs_all_tokens(self) -> bool:
        return False

    def states_of(self, hidden_states: HiddenStates) -> Tensor:
        tapped = self.taps.states
        if self.tap_norms:
            pairs = zip(tapped, self.tap_norms, strict=True)
            tapped = [self.ops.rms_norm(states, norm) for states, norm in pairs]
        joined = torch.cat(list(tapped), dim=1)
        if self.taps_norm is not None:
            joined = self.ops.rms_norm(joined, self.taps_norm)
        return self.projection(joined)

    def forward(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        embeddings = self.ops.rms_norm(self.embedding.rows(token_ids), self.embedding_norm)
        normed = self.ops.rms_norm(states, self.state_norm)
        inputs = torch.cat((embeddings, normed), dim=1)
        residual = normed if self.adds_normed else states
        hidden, _ = self.layer.forward(forward_pass, LayerInput(residual, inputs), None)
        return self.ops.rms_norm(hidden, self.norm) if self.feeds_back_normed else hidden

    def logits(self, states: Tensor) -> Tensor:
        normed = states if self.feeds_back_normed else self.ops.rms_norm(states, self.norm)
        logits = self.head(normed).float()
        if self.drafted_ids is None:
            return logits
        spread = logits.new_full((len(logits), self.config.vocab_size), NEVER_DRAFTED)
        spread[:, self.drafted_ids] = logits
        return spread
