"""The parts a decoder is computed with: the Protocol that kernels keep to, and plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.quantize import Quantized
from engine.runner.rope import rotate

Angles = tuple[Tensor, Tensor]  # cosines and sines, each [tokens, 1, head_dim]


class Peaks(NamedTuple):
    """Of each row of logits."""

    token_ids: Tensor  # whose is the largest, the first of equals; means nothing beside a NaN
    are_finite: Tensor  # all of them: booleans


class Linear(Protocol):
    """A matrix that states are multiplied by, held as its implementation likes it best."""

    def __call__(self, states: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, rows]. A row of the answer depends on its own token only."""
        ...

    def rows(self, row_ids: Tensor) -> Tensor:
        """Some rows of the matrix, as they are."""
        ...


class Ops(Protocol):
    """Each rounds to the dtype of its input where torch does."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        """The tensors may be kept or copied; the caller lets go of them."""
        ...

    def normed(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """RMS norm of [tokens, size]."""
        ...

    def rotated(self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles) -> Tensor:
        """[tokens, heads, head_dim]: each head normed, if there is a norm, then turned."""
        ...

    def gated(self, gate_up: Tensor) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: SiLU of the first half times the second."""
        ...

    def peaks(self, logits: Tensor) -> Peaks:
        """Of [rows, vocab_size] in float32."""
        ...


class TorchOps:
    """The reference."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> TorchLinear:
        plain = weight.restored() if isinstance(weight, Quantized) else weight
        return TorchLinear(plain, bias)

    def normed(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = states.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + epsilon)).to(states.dtype)

    def rotated(self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles) -> Tensor:
        if norm is not None:
            heads = self.normed(heads, norm, epsilon)
        return rotate(heads, *angles)

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def peaks(self, logits: Tensor) -> Peaks:
        # NaN goes through both. They are ten times faster than `aminmax`.
        least, most = logits.amin(dim=-1), logits.amax(dim=-1)
        return Peaks(_places_of_largest(logits), least.isfinite() & most.isfinite())


def _places_of_largest(logits: Tensor) -> Tensor:
    """On the CPU numpy is ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        return functional.linear(states, self.weight, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        return functional.embedding(row_ids, self.weight)
