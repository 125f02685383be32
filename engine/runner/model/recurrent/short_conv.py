"""Short convolution over products of two projections, times its gates (LFM2).

There is no matrix: the state is the products of the last tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from baton.engine.runner.model.config import RecurrentConfig
from baton.engine.runner.model.recurrent.rule import RecurrentRule, Rows


@dataclass(frozen=True, slots=True)
class ShortConv(RecurrentRule):
    kernel: ClassVar[str] = "baton_short_conv"
    stored_conv: ClassVar[str] = "conv"

    @staticmethod
    def stored_rows(config: RecurrentConfig) -> tuple[Rows, Rows]:
        """Return the rows of factors (B) and values (x), and those of the gates (C) in between."""
        size = config.num_values
        return [*range(size), *range(2 * size, 3 * size)], range(size, 2 * size)

    def channels(self, config: RecurrentConfig, projected: Tensor) -> Tensor:
        factors, values = projected.chunk(2, dim=1)
        return factors * values

    def apply(
        self, config: RecurrentConfig, mixed: Tensor, gates: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return gates.float() * mixed, state
