"""Decoder: embeddings, layers and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.device.fenced_hook import FencedHook
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, join_layers
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Norm, Ops


class GivenRows(NamedTuple):
    """Rows that some tokens take in place of their embeddings, such as those of a picture."""

    tokens: Tensor  # indices
    rows: Tensor
    levels: Sequence[Tensor] = ()  # added to the outputs of the first layers (DeepStack)


@dataclass(eq=False)  # not frozen: `benchmarks/engine` wraps its methods
class Decoder:
    """Model weights and the forward pass. Holds no request state."""

    config: ModelConfig
    ops: Ops
    embedding: Linear
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    waits_for_experts: bool = False  # the CPU reads which experts are chosen
    classifier: Tensor | None = None  # [num_labels, hidden_size] in float32

    def forward(
        self,
        token_ids: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None = None,
        given: GivenRows | None = None,
    ) -> Tensor:
        """[tokens] → [tokens, hidden_size], normalised and ready for `logits`.

        With `ends`, only the hidden states of those tokens are returned.
        """
        embeddings, layers = self.embed(token_ids), self.layers
        if given is not None:
            embeddings[given.tokens] = given.rows.to(embeddings.dtype)
        inputs = LayerInput(embeddings)
        levels = () if given is None else given.levels
        if hook is None and not levels:
            layers = self._joined_layers
        last = len(layers) - 1
        for index, layer in enumerate(layers):
            needed = ends if index == last and index >= len(levels) else None
            inputs = layer.forward(forward_pass, inputs, needed)
            if given is not None and index < len(levels):
                inputs.hidden_states[given.tokens] += levels[index].to(embeddings.dtype)
                inputs = LayerInput(inputs.hidden_states)  # to be normed again
            if hook is not None:
                hook.layer_done(index)
        hidden_states = inputs.hidden_states
        if ends is not None and last < len(levels):
            hidden_states = hidden_states[ends.indices]
        return self.ops.rms_norm(hidden_states, self.norm)

    @cached_property
    def _joined_layers(self) -> Sequence[DecoderLayer]:
        return join_layers(self.layers)

    def logits(self, hidden_states: Tensor, dst: Tensor | None = None) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32, in `dst` if it is given."""
        logits = self.head(hidden_states)
        logits = logits.float() if dst is None else dst.copy_(logits)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        softcap = self.config.logits_softcap
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        embeddings = self.embedding.rows(token_ids)
        if self.config.embedding_scale == 1.0:
            return embeddings
        # The scale is rounded to the dtype first, as the models were trained.
        return embeddings * torch.tensor(self.config.embedding_scale, dtype=embeddings.dtype)
