"""Mamba2 (Granite 4, Bamba, Nemotron-H, Falcon-H1).

A token with key k (B), value v (x), query q (C) and step t (dt) decays the state by exp(-rate * t),
writes t * v and reads its own value, too, times a weight of the head (D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.recurrent.matrix_rule import Decays, MatrixRule
from baton.engine.runner.model.recurrent.rule import Rows, RuleTensors


@dataclass(frozen=True, slots=True)
class Mamba2(MatrixRule):
    """Weights of a layer. Its gates are steps."""

    kernel: ClassVar[str] = "baton_mamba"
    has_triton_kernels: ClassVar[bool] = True
    kernel_fields: ClassVar[tuple[str, ...]] = ("conv_bias", "step_bias", "decay_rate", "skip")

    conv_bias: Tensor  # [channels] in float32
    step_bias: Tensor  # [value heads] in float32, as `skip`
    skip: Tensor

    @staticmethod
    def stored_rows(config: RecurrentConfig) -> tuple[Rows, Rows]:
        """Return rows of output gates, values, keys, queries and steps."""
        values, end = config.num_values, config.num_values + config.num_channels
        channels = _stored_channels(config.num_channels, values)
        rows = [*(values + channel for channel in channels), *range(values)]
        return rows, range(end, end + config.num_value_heads)

    @classmethod
    def load(cls, config: RecurrentConfig, gates: Linear, tensors: RuleTensors) -> Self:
        conv, heads = cls.load_conv(config, tensors), config.num_value_heads
        channels = _stored_channels(config.num_channels, config.num_values)
        return cls(
            gates=gates,
            conv=conv[:, channels].contiguous(),
            conv_bias=tensors.vector("conv1d.bias", config.num_channels)[channels],
            step_bias=tensors.vector("dt_bias", heads),
            decay_rate=tensors.vector("A_log", heads).exp(),
            skip=tensors.vector("D", heads),
            norm=tensors.gated_norm(config.num_values) if config.has_norm else None,
        )

    def convolve(self, inputs: Tensor) -> Tensor:
        return MatrixRule.convolve(self, inputs) + self.conv_bias

    def factors(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        steps = functional.softplus(gates.float() + self.step_bias)
        return -self.decay_rate * steps, steps

    def write(
        self, key: Tensor, value: Tensor, strength: Tensor, decays: Decays, state: Tensor
    ) -> Tensor:
        return value * strength

    def read(self, output: Tensor, value: Tensor) -> Tensor:
        return output + self.skip[:, None, None] * value

    def gate(self, config: RecurrentConfig, output: Tensor, gates: Tensor) -> Tensor:
        """Return the norm, if there is one, of each group of heads, after their gates."""
        gated = (output * gates).flatten(1)
        if self.norm is None:
            return gated
        groups = gated.unflatten(1, (config.num_key_heads, -1))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.norm.epsilon)
        weighted: Tensor = self.norm.weight * (groups * scale).flatten(1)
        return weighted


def _stored_channels(num_channels: int, num_values: int) -> list[int]:
    """Return the channels of queries, keys and values among values, keys and queries."""
    queries = (num_channels + num_values) // 2
    return [*range(queries, num_channels), *range(num_values, queries), *range(num_values)]
