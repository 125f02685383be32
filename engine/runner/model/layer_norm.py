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
        dtype, size = hidden_states.dtype, hidden_states.shape[-1:]
        if hidden_states.device.type != "cpu":  # there, torch widens each number as it reads it
            hidden_states = hidden_states.float()
        normed = functional.layer_norm(hidden_states, size, self.weight, self.bias, self.epsilon)
        return normed.to(dtype)
