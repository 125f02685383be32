"""Operations of a decoder: the Protocol of its kernels and the plain torch reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.model.rope import rotate
from engine.runner.weights.quantize import Quantized

Angles = tuple[Tensor, Tensor]  # cosines and sines, each [tokens, 1, head_dim]


class Peaks(NamedTuple):
    """Argmax and finiteness of each row of logits."""

    token_ids: Tensor  # argmax, the first of equal values; undefined in a row with a NaN
    are_finite: Tensor  # booleans: all logits of the row are finite


class Linear(Protocol):
    """Linear layer, or embedding table, whose weight is in the layout of its implementation."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, rows]. An output row depends only on its own token."""
        ...

    def rows(self, row_ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized, as an embedding lookup does."""
        ...


class Ops(Protocol):
    """Operations of a decoder. Each rounds to the dtype of its input where torch does."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        """Make a linear layer. It owns the tensors from then on, and can keep or copy them."""
        ...

    def rms_norm(self, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of [tokens, size]."""
        ...

    def apply_rope(
        self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles
    ) -> Tensor:
        """RoPE of [tokens, heads, head_dim]. If `norm` is given, each head is RMS-normed first."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: SiLU of the first half times the second."""
        ...

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Return argmax and finiteness of each row of [rows, vocab_size] in float32."""
        ...


class TorchOps:
    """Reference implementation in plain torch."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> TorchLinear:
        plain = weight.dequantize() if isinstance(weight, Quantized) else weight
        return TorchLinear(plain, bias)

    def rms_norm(self, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = hidden_states.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + epsilon)).to(hidden_states.dtype)

    def apply_rope(
        self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles
    ) -> Tensor:
        if norm is not None:
            heads = self.rms_norm(heads, norm, epsilon)
        return rotate(heads, *angles)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def find_peaks(self, logits: Tensor) -> Peaks:
        # Both propagate NaN. They are ten times faster than `aminmax`.
        lowest, highest = logits.amin(dim=-1), logits.amax(dim=-1)
        return Peaks(_argmax(logits), lowest.isfinite() & highest.isfinite())


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row. On the CPU numpy is ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return functional.linear(hidden_states, self.weight, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        return functional.embedding(row_ids, self.weight)
