"""The decoder: embeddings, layers, and the head that gives logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.runner.attention import AttentionPass
from engine.runner.config import ModelConfig
from engine.runner.layers import Layers
from engine.runner.ops import Angles, Linear, Ops, Peaks


class LayerCalls(Protocol):
    """Called between the layers of a pass."""

    def layer_done(self, layer: int) -> None: ...

    def pass_done(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ends:
    """The tokens whose states are asked for, as a pass of their own behind that of all tokens."""

    places: Tensor
    attention: AttentionPass


class Decoder:
    """The weights and the pass over them; holds no state of any request."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        embedding: Linear,
        layers: Layers,
        norm: Tensor,
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
        angles: Angles,
        attention: AttentionPass,
        hook: LayerCalls | None,
        ends: Ends | None = None,
    ) -> Tensor:
        """[tokens] → [tokens, hidden_size], normed and ready for `logits`.

        With `ends` only theirs: of the others, the last layer needs to leave no more than keys
        and values.
        """
        states = self._embedding.rows(token_ids)
        layers = self._layers.begin(angles, attention)
        last = self._config.num_layers - 1
        for index in range(self._config.num_layers):
            if index == last and ends is not None:
                layers.write(index, states)
                states = states[ends.places]
                cosines, sines = (angle[ends.places] for angle in angles)
                layers = self._layers.begin((cosines, sines), ends.attention)
            if len(states):
                states = layers.through(index, states)
            if hook is not None:
                hook.layer_done(index)
        if hook is not None:
            hook.pass_done()
        return self._ops.normed(states, self._norm, self._config.rms_norm_eps)

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        return self._head(states).float()

    def peaks(self, logits: Tensor) -> Peaks:
        return self._ops.peaks(logits)
