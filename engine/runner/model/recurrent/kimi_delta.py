"""Kimi delta attention (Kimi Linear): the gated delta rule with a decay for each key channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from baton.checkpoint.checkpoint import Shape
from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.recurrent.gated_delta import GatedDelta
from baton.engine.runner.model.recurrent.rule import Rows


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

    @classmethod
    def shapes(cls, config: RecurrentConfig) -> dict[str, Shape]:
        biases, heads = (config.num_value_heads * config.num_decays,), config.num_value_heads
        return GatedDelta.shapes(config) | {"dt_bias": biases, "A_log": (1, 1, heads, 1)}

    def factors(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        num_heads = len(self.decay_rate)
        strengths, decays = gates.float().tensor_split([num_heads], dim=2)
        steps = functional.softplus(decays + self.decay_bias).unflatten(2, (num_heads, -1))
        return -self.decay_rate[:, None] * steps, strengths.sigmoid() * self.strength_scale

    def activate(self, gates: Tensor) -> Tensor:
        return gates.sigmoid()
