"""Linear attention by the gated delta rule: its weights and its mathematics in torch.

A head's state is a matrix S that maps keys to values. A token with key k, value v, decay a and
write strength b replaces it by a * S + k * b * (v - a * S k), and reads it with its query. The
tokens of a chunk are computed together: the values that they write solve a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.model.linear import Linear
from engine.runner.model.ops import Norm

CHUNK = 64  # tokens that are computed together
NORM_EPSILON = 1e-6  # of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer that only linear attention has."""

    gates: Linear  # rows of write strengths, then of decays
    conv: Tensor  # [conv_size, channels], the oldest token first
    decay_bias: Tensor  # [value heads] in float32
    decay_rate: Tensor  # [value heads] in float32
    norm: Norm  # of a head's output, before its gate


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule in float32, each [sequences, value heads, tokens, ..]."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    strength: Tensor


def convolve(inputs: Tensor, weights: Tensor) -> Tensor:
    """Return SiLU of the causal convolution of [sequences, conv_size - 1 + tokens, channels]."""
    conv_size = len(weights)
    num_tokens = inputs.shape[1] - conv_size + 1
    total = torch.zeros(1, device=inputs.device)
    for tap, weight in enumerate(weights.float()):
        total = total + weight * inputs[:, tap : tap + num_tokens].float()
    return functional.silu(total.to(inputs.dtype))


def unit_length(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


def log_decay(weights: DeltaWeights, gates: Tensor) -> Tensor:
    return -weights.decay_rate * functional.softplus(gates.float() + weights.decay_bias)


def gated_norm(heads: Tensor, gates: Tensor, norm: Norm) -> Tensor:
    """RMS norm of each head, times SiLU of its gate."""
    wide = heads.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.epsilon)
    weighted = norm.weight * normed.to(heads.dtype)
    return (weighted * functional.silu(gates.float())).to(heads.dtype)


def apply_delta_rule(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs, [sequences, heads, tokens, value_dim], and the new state."""
    outputs = [torch.zeros_like(inputs.value[:, :, :0])]
    for first in range(0, inputs.key.shape[2], CHUNK):
        chunk = DeltaInputs(*(each[:, :, first : first + CHUNK] for each in inputs))
        output, state = _apply_chunk(chunk, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2), state


def _apply_chunk(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    query, key, value, decay, strength = inputs
    since_start = decay.cumsum(-1)  # log of the decay from the state to each token
    between = since_start[..., :, None] - since_start[..., None, :]
    num_tokens = key.shape[2]
    is_later = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=key.device).triu(1)
    between = between.masked_fill(is_later, float("-inf")).exp()
    system = strength[..., None] * (key @ key.mT) * between
    from_state = since_start.exp()[..., None]
    wanted = strength[..., None] * (value - from_state * (key @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = from_state * (query @ state) + ((query @ key.mT) * between) @ written
    to_end = (since_start[..., -1:] - since_start).exp()[..., None]
    state = since_start[..., -1].exp()[..., None, None] * state + (key * to_end).mT @ written
    return output, state
