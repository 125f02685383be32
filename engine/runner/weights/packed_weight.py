"""A matrix as the kernels read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.linear import Linear


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Packed matrix. `data` is not changed any more."""

    fields: Mapping[str, int]  # those of PackedMatrix that describe `data`
    data: Tensor  # bytes
    column_order: Tensor | None = None  # int64: permutes the activations


class Packer(Protocol):
    """Packs matrices, and makes linear layers of packed ones."""

    @property
    def layout(self) -> str:
        """Return a name that differs if the same matrix is packed into other bytes."""
        ...

    def pack(self, weight: Tensor | Quantized) -> PackedWeight: ...

    def packed_linear(self, packed: PackedWeight, bias: Tensor | None) -> Linear: ...
