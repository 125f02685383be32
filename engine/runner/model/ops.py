"""Operations of a decoder: the Protocol of its kernels and the plain torch reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.model.config import Activation
from engine.runner.model.experts import Moe, Router, Routing, mix_experts, route
from engine.runner.model.rope import Angles, rotate
from engine.runner.weights.quantize import Quantized


class Peaks(NamedTuple):
    """Argmax and finiteness of each row of logits."""

    token_ids: Tensor  # argmax, the first of equal values; undefined in a row with a NaN
    are_finite: Tensor  # booleans: all logits of the row are finite


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm. With `rounds_once` the weight is float32, and only the product is rounded."""

    weight: Tensor
    epsilon: float
    rounds_once: bool = False


@dataclass(frozen=True, slots=True)
class Gate:
    """Activation of a gated MLP. `alpha` and `limit` belong to CLAMPED_SWIGLU."""

    activation: Activation = Activation.SILU
    alpha: float = 0.0
    limit: float = 0.0


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

    copies_weights: bool  # `linear` copies the weight, so that it can be a mapped file

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        """Make a linear layer. It owns the tensors from then on, and can keep or copy them."""
        ...

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        """RMS norm of [tokens, size]."""
        ...

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        """RoPE of [tokens, heads, head_dim]. If `norm` is given, each head is RMS-normed first."""
        ...

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: function of the first half times the second."""
        ...

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        """Return `hidden_states` + `output` * `scale`. Can overwrite `hidden_states`."""
        ...

    def route(self, hidden_states: Tensor, router: Router) -> Routing:
        """Choose the experts of each token. A token's choice depends only on the token."""
        ...

    def mix_experts(self, moe: Moe, gate: Gate, hidden_states: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, hidden_size]."""
        ...

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Return argmax and finiteness of each row of [rows, vocab_size] in float32."""
        ...


class TorchOps:
    """Reference implementation in plain torch."""

    copies_weights = False

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> TorchLinear:
        plain = weight.dequantize() if isinstance(weight, Quantized) else weight
        return TorchLinear(plain, bias)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        wide = hidden_states.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(variance + norm.epsilon)
        if norm.rounds_once:
            return (normed * norm.weight).to(hidden_states.dtype)
        return norm.weight * normed.to(hidden_states.dtype)

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        if norm is not None:
            heads = self.rms_norm(heads, norm)
        return rotate(heads, *angles)

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        first, up = gate_up.chunk(2, dim=-1)
        if gate.activation is Activation.SILU:
            return functional.silu(first) * up
        if gate.activation is Activation.GELU_TANH:
            return functional.gelu(first, approximate="tanh") * up
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return (up + 1) * (first * torch.sigmoid(first * gate.alpha))

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        return hidden_states + (output if scale == 1.0 else output * scale)

    def route(self, hidden_states: Tensor, router: Router) -> Routing:
        return route(hidden_states, router)

    def mix_experts(self, moe: Moe, gate: Gate, hidden_states: Tensor, routing: Routing) -> Tensor:
        return mix_experts(self, moe, gate, hidden_states, routing)

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
