"""Decoder: embeddings, layers and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.runner.device.device import FencedHook
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, join_layers
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.per_layer import PerLayerInputs

LOWEST_LOGIT = -1e30  # finite: rows with an infinite logit are failures


class GivenRows(NamedTuple):
    """Rows that some tokens take in place of their embeddings, such as those of a picture."""

    tokens: Tensor  # indices
    rows: Tensor
    levels: Sequence[Tensor] = ()  # added to the outputs of the first layers (DeepStack)


class CausalLm(Protocol):
    """Decoder with its head, whoever computes it, as passes and output heads use it."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def ops(self) -> Ops: ...

    @property
    def waits_for_experts(self) -> bool: ...

    @property
    def classifier(self) -> Tensor | None: ...

    def forward(
        self,
        token_ids: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None = None,
        given: GivenRows | None = None,
    ) -> Tensor:
        """See `Decoder.forward`."""
        ...

    def logits(self, hidden_states: Tensor, dst: Tensor | None = None) -> Tensor:
        """See `Decoder.logits`."""
        ...


@dataclass(eq=False)  # not frozen: `benchmarks/engine` wraps its methods
class Decoder:
    """Implements `CausalLm` by layers of Baton. Holds no request state."""

    config: ModelConfig
    ops: Ops
    embedding: Linear
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Linear
    waits_for_experts: bool = False  # the CPU reads which experts are chosen
    classifier: Tensor | None = None  # [num_labels, hidden_size] in float32
    per_layer_inputs: PerLayerInputs | None = None

    def __post_init__(self) -> None:
        self._last_writer = self.config.last_writer

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
        embeddings = self.embed(token_ids)
        if given is not None:
            embeddings[given.tokens] = given.rows.to(embeddings.dtype)
        if self.per_layer_inputs is not None:
            forward_pass.per_layer_inputs = self.per_layer_inputs.compute(
                token_ids, embeddings, None if given is None else given.tokens
            )
        if given is not None and given.levels:
            hidden_states = self._forward_levels(embeddings, forward_pass, hook, ends, given)
        else:
            hidden_states = self._forward(embeddings, forward_pass, hook, ends)
        return self.ops.rms_norm(hidden_states, self.norm)

    def _forward(
        self,
        embeddings: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None,
    ) -> Tensor:
        layers, last_writer = self.layers, self._last_writer
        if hook is None:
            layers, last_writer = self._joined_layers
        inputs = LayerInput(embeddings)
        for index, layer in enumerate(layers):
            needed = ends if index == last_writer else None
            if len(inputs.hidden_states):
                inputs = layer.forward(forward_pass, inputs, needed)
            if needed is not None and index < len(layers) - 1:
                forward_pass = forward_pass.restrict_to(needed)  # later layers write nothing
            if hook is not None:
                hook.layer_done(index)
        return inputs.hidden_states

    def _forward_levels(
        self,
        embeddings: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None,
        given: GivenRows,
    ) -> Tensor:
        """Add rows to the outputs of the first layers."""
        inputs, last = LayerInput(embeddings), len(self.layers) - 1
        has_plain_end = last >= len(given.levels)
        for index, layer in enumerate(self.layers):
            needed = ends if index == last and has_plain_end else None
            inputs = layer.forward(forward_pass, inputs, needed)
            if index < len(given.levels):
                inputs.hidden_states[given.tokens] += given.levels[index].to(embeddings.dtype)
                inputs = LayerInput(inputs.hidden_states)  # to be normed again
            if hook is not None:
                hook.layer_done(index)
        hidden_states = inputs.hidden_states
        return hidden_states if ends is None or has_plain_end else hidden_states[ends.indices]

    @cached_property
    def _joined_layers(self) -> tuple[Sequence[DecoderLayer], int]:
        return join_layers(self.layers, self._last_writer)

    def logits(self, hidden_states: Tensor, dst: Tensor | None = None) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32, in `dst` if it is given."""
        logits = self.head(hidden_states)
        logits = logits.float() if dst is None else dst.copy_(logits)
        if self.config.logits_scale != 1.0:
            logits.mul_(self.config.logits_scale)
        softcap = self.config.logits_softcap
        if softcap is not None:
            # softcap * tanh(logits / softcap), in a sixth of the time that torch takes for tanh.
            logits.mul_(2 / softcap).sigmoid_().mul_(2 * softcap).sub_(softcap)
        for token_id in self.config.suppressed_token_ids:
            logits[:, token_id] = LOWEST_LOGIT
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        embeddings = self.embedding.rows(token_ids)
        if self.config.embedding_scale == 1.0:
            return embeddings
        # The scale is rounded to the dtype first, as the models were trained.
        return embeddings * torch.tensor(self.config.embedding_scale, dtype=embeddings.dtype)
