"""Gated delta rule (Qwen3-Next, Qwen3.5, OLMo Hybrid).

A token with value v and write strength b writes b * (v - a * S k). The values that the tokens of a
chunk write solve a triangular system.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.recurrent.matrix_rule import Decays, MatrixRule
from baton.engine.runner.model.recurrent.rule import Rows, RuleTensors

NORM_EPSILON = 1e-6  # for queries and keys


@dataclass(frozen=True, slots=True)
class GatedDelta(MatrixRule):
    """Weights of a layer. Its gates are write strengths, then decays."""

    kernel: ClassVar[str] = "baton_delta"
    has_triton_kernels: ClassVar[bool] = True
    kernel_fields: ClassVar[tuple[str, ...]] = (
        "decay_bias",
        "decay_rate",
        "strength_scale",
        "decays_channels",
    )
    decays_channels: ClassVar[bool] = False  # each one by itself

    norm: Norm
    decay_bias: Tensor  # [value heads] in float32
    strength_scale: float = 1.0

    @staticmethod
    def stored_rows(config: RecurrentConfig) -> tuple[Rows, Rows]:
        """Return the rows of matrices that are stored by key head."""
        values = config.num_values // config.num_key_heads
        heads = config.num_value_heads // config.num_key_heads
        rows = _regroup(config.num_key_heads, (config.key_dim, config.key_dim, values, values))
        return rows, _regroup(config.num_key_heads, (heads, heads))

    @classmethod
    def load(cls, config: RecurrentConfig, gates: Linear, tensors: RuleTensors) -> Self:
        heads = config.num_value_heads
        rates = (1, 1, heads, 1) if cls.decays_channels else (heads,)
        return cls(
            gates=gates,
            conv=cls.load_conv(config, tensors),
            decay_bias=tensors.vector("dt_bias", heads * config.num_decays),
            decay_rate=tensors.vector("A_log", *rates).flatten().exp(),
            norm=tensors.gated_norm(config.value_dim),
            strength_scale=config.strength_scale,
        )

    def scale(self, config: RecurrentConfig, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return _unit_length(query) * config.key_dim**-0.5, _unit_length(key)

    def factors(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        strengths, decays = gates.chunk(2, dim=2)
        steps = functional.softplus(decays.float() + self.decay_bias)
        return -self.decay_rate * steps, strengths.float().sigmoid() * self.strength_scale

    def write(
        self, key: Tensor, value: Tensor, strength: Tensor, decays: Decays, state: Tensor
    ) -> Tensor:
        system = strength * decays.products(key, key)
        wanted = strength * (value - (decays.from_state * key) @ state)
        written: Tensor = torch.linalg.solve_triangular(
            system, wanted, upper=False, unitriangular=True
        )
        return written

    def gate(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the norm of each head, times its gates."""
        normed = output * torch.rsqrt(output.square().mean(-1, keepdim=True) + self.norm.epsilon)
        return (self.norm.weight.float() * normed * gates).flatten(1)


def _unit_length(heads: Tensor) -> Tensor:
    """Divide each head by its length."""
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPSILON)


def _regroup(num_groups: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the rows of all first parts of the groups, then of all second ones, and so on."""
    starts = range(0, num_groups * sum(sizes), sum(sizes))
    parts = zip(accumulate(sizes, initial=0), sizes, strict=False)
    return [start + first + row for first, size in parts for start in starts for row in range(size)]


@dataclass(frozen=True, slots=True)
class KimiDelta(GatedDelta):
    """Weights of a layer. Its output gates are sigmoids."""

    has_triton_kernels: ClassVar[bool] = False
    chunk: ClassVar[int] = 16  # each pair of tokens has a decay for each channel
    decays_channels: ClassVar[bool] = True

    @staticmethod
    def stored_rows(config: RecurrentConfig) -> tuple[Rows, Rows]:
        rows = config.num_channels + config.num_values
        return range(rows), range(config.num_value_heads * (1 + config.num_decays))

    def factors(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        num_heads = len(self.decay_rate)
        strengths, decays = gates.float().tensor_split([num_heads], dim=2)
        steps = functional.softplus(decays + self.decay_bias).unflatten(2, (num_heads, -1))
        return -self.decay_rate[:, None] * steps, strengths.sigmoid() * self.strength_scale

    def activate(self, gates: Tensor) -> Tensor:
        return gates.sigmoid()
