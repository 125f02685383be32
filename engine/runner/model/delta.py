"""Linear attention by the gated delta rule: its weights and its mathematics in torch.

A token with key k, value v, decay a and write strength b writes b * (v - a * S k). The values that
the tokens of a chunk write solve a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent import (
    Heads,
    apply_in_chunks,
    chunk_decays,
    read_and_write,
    repeat_heads,
)

NORM_EPSILON = 1e-6  # of queries and keys


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer by the gated delta rule. Implements `RecurrentWeights`."""

    gates: Linear  # rows of write strengths, then of decays
    conv: Tensor
    decay_bias: Tensor  # [value heads] in float32
    decay_rate: Tensor  # [value heads] in float32
    norm: Norm  # of a head's output, before its gate
    conv_bias: None = None

    def apply(
        self, config: RecurrentConfig, heads: Heads, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        strengths, decays = gates.chunk(2, dim=2)
        inputs = (
            repeat_heads(config, _unit_length(heads.query)) * config.key_dim**-0.5,
            repeat_heads(config, _unit_length(heads.key)),
            heads.value,
            self._log_decay(decays).transpose(1, 2),
            strengths.sigmoid().float().transpose(1, 2),
        )
        return apply_in_chunks(_apply_chunk, inputs, state)

    def finish(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the RMS norm of each head, times SiLU of its gate."""
        wide = output.to(gates.dtype).float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.norm.epsilon)
        weighted = self.norm.weight * normed.to(gates.dtype)
        return (weighted * functional.silu(gates.float())).to(gates.dtype)

    def _log_decay(self, gates: Tensor) -> Tensor:
        return -self.decay_rate * functional.softplus(gates.float() + self.decay_bias)


def _unit_length(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _apply_chunk(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    decays = chunk_decays(log_decay)
    system = strength[..., None] * (key @ key.mT) * decays.between
    wanted = strength[..., None] * (value - decays.from_state * (key @ state))
    written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    return read_and_write(query, key, written, decays, state)
