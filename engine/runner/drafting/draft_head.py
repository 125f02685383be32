"""Draft head: layers after those of a model that predict the tokens after the next one.

Most heads read a model's hidden states: their input at a position is the state of that position and
the embedding of the token after it, and their output predicts the token after that. They go on from
their own states. A draft model reads the tokens of the positions alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.checkpoint.checkpoint import Tensors
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.mixers import ForwardPass
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.weights.tensor_loading import LoadTarget


class DraftHead(Protocol):
    """Weights of a head. Holds no request state."""

    @property
    def config(self) -> ModelConfig:
        """Return the configuration of its layers."""
        ...

    @property
    def reads_next_tokens(self) -> bool:
        """Return whether the input at a position is the token after it, with the model's state."""
        ...

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether it reads the model's last hidden states of all tokens."""
        ...

    def states_of(self, hidden_states: HiddenStates) -> Tensor | None:
        """Return what it reads of the tokens of the pass; None if it reads none.

        Later passes do not overwrite it.
        """
        ...

    def inputs_of(self, states: Tensor) -> Tensor:
        """Return states of the model in the form of its own. They may be computed much later."""
        ...

    def forward(
        self, token_ids: Tensor, states: Tensor | None, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        """Compute the layers, which write their KV, and return the states of the next step.

        The given ones, its own or `inputs_of` the model's, can be overwritten. A head that reads
        none gets None.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return what states predict: [rows, hidden_size] → [rows, vocab_size] in float32."""
        ...


LoadHead = Callable[[Tensors, Decoder, LoadTarget], DraftHead]


@dataclass(frozen=True, slots=True)
class OpenHead:
    """Head whose weights are not loaded yet."""

    extended: ModelConfig  # the model with the layers of the head after its own, as in the KV cache
    attention: Sequence[LayerAttention]  # of these layers
    load: LoadHead  # from the model's tensors, or its own; the decoder then serves it
    has_folder: bool = False  # that of `speculative_model`
