"""Layer norm of encoders and vision towers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm. Weight and bias are float32: only the result is rounded."""

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Layer norm of [tokens, size], in plain torch."""
        size = hidden_states.shape[-1:]  # torch computes it in float32
        return functional.layer_norm(hidden_states, size, self.weight, self.bias, self.epsilon)
