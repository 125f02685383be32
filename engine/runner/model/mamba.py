"""Mamba2 layers: their weights and their mathematics in torch.

A token with key k (B), value v (x), query q (C) and step t (dt) decays the state by exp(-rate * t),
writes t * v and reads its own value, too, times a weight of the head (D).
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


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Weights of a Mamba2 layer. Implements `RecurrentWeights`.

    Vectors are float32. One number of a head is in `step_bias`, `decay_rate` and `skip`.
    """

    gates: Linear  # rows of steps
    conv: Tensor
    conv_bias: Tensor  # [channels]
    step_bias: Tensor
    decay_rate: Tensor
    skip: Tensor
    norm: Norm  # of the output of all heads of a group, after their gates

    def apply(
        self, config: RecurrentConfig, heads: Heads, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        steps = functional.softplus(gates.float() + self.step_bias)
        inputs = (
            repeat_heads(config, heads.query),
            repeat_heads(config, heads.key),
            heads.value * steps.transpose(1, 2)[..., None],
            (-self.decay_rate * steps).transpose(1, 2),
        )
        output, state = apply_in_chunks(_apply_chunk, inputs, state)
        return output + self.skip[:, None, None] * heads.value, state

    def finish(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the RMS norm of each group of heads, after their gates."""
        gated = (output * functional.silu(gates.float())).flatten(1)
        groups = gated.unflatten(1, (config.num_key_heads, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.norm.epsilon)
        weighted: Tensor = self.norm.weight * (groups * scale).flatten(1)
        return weighted.to(gates.dtype).view(gates.shape)


def _apply_chunk(
    query: Tensor, key: Tensor, written: Tensor, log_decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return read_and_write(query, key, written, chunk_decays(log_decay), state)
