"""Decoder: embeddings, layers and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.attention.paged_attention import AttentionPass
from baton.engine.runner.device import FencedHook
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import Layers
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm, Ops, Peaks
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.state.linear_attention import LinearAttentionPass


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens whose hidden states are needed, with an attention pass over them alone.

    The last layer computes only these tokens, after the KV of all tokens was written. A recurrent
    one computes all.
    """

    places: Tensor  # flat indices
    attention: AttentionPass


class Decoder:
    """Model weights and the forward pass. Holds no request state."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Linear,
        layers: Layers,
        norm: Norm,
        head: Linear,
    ) -> None:
        self._config = config
        self._ops = ops
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head

    def forward(
        self,
        token_ids: Tensor,
        angles: Sequence[Angles],
        attention: AttentionPass,
        hook: FencedHook | None,
        ends: Ends | None = None,
        linear_attention: LinearAttentionPass | None = None,
    ) -> Tensor:
        """[tokens] → [tokens, hidden_size], normalised and ready for `logits`.

        With `ends`, only the hidden states of those tokens are returned, and the last layer
        computes only keys and values of the others.
        """
        hidden_states = self._embed(token_ids)
        layers = self._layers.begin(angles, attention, linear_attention)
        last = self._config.num_layers - 1
        if self._config.layers[last].is_recurrent:
            last += 1  # its state needs all tokens
        for index in range(self._config.num_layers):
            if index == last and ends is not None:
                layers.write(index, hidden_states)
                hidden_states = hidden_states[ends.places]
                angles = [(cos[ends.places], sin[ends.places]) for cos, sin in angles]
                layers = self._layers.begin(angles, ends.attention)
            if len(hidden_states):
                hidden_states = layers.through(index, hidden_states)
            if hook is not None:
                hook.layer_done(index)
        if hook is not None:
            hook.pass_done()
        if ends is not None and last == self._config.num_layers:
            hidden_states = hidden_states[ends.places]
        return self._ops.rms_norm(hidden_states, self._norm)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        logits = self._head(hidden_states).float()
        if self._config.logits_scale != 1.0:
            logits = logits * self._config.logits_scale
        if self._config.logits_softcap is not None:
            logits = torch.tanh(logits / self._config.logits_softcap) * self._config.logits_softcap
        return logits

    def _embed(self, token_ids: Tensor) -> Tensor:
        embeddings = self._embedding.rows(token_ids)
        if self._config.embedding_scale == 1.0:
            return embeddings
        # The scale is rounded to the dtype first, as the models were trained.
        return embeddings * torch.tensor(self._config.embedding_scale, dtype=embeddings.dtype)

    def find_peaks(self, logits: Tensor) -> Peaks:
        return self._ops.find_peaks(logits)
