"""EAGLE-3 head: a decoder layer over the hidden states of three layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.draft_heads.taps import Taps
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import DecoderLayer, LayerInput
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import ForwardPass
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.sampling.output_heads import HiddenStates

NEVER_DRAFTED = -1e30  # finite: logits that are not count as a failure


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
    def reads_next_tokens(self) -> bool:
        return True

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
