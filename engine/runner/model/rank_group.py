"""Ranks that compute one model together, each with a shard of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.engine.runner.model.linear import Linear


class Shard(NamedTuple):
    """One of `size` equal parts of the weights: that of the rank."""

    rank: int
    size: int


class RankGroup(Protocol):
    """Collective operations, which all ranks call in the same order. With one rank there is none.

    Each can overwrite its argument.
    """

    @property
    def shard(self) -> Shard: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, columns of all ranks], in the order of ranks."""
        ...


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Implements `Linear` by a part of the columns in each rank."""

    part: Linear
    group: RankGroup

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(hidden_states))

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.group.all_gather(self.part.rows(row_ids))
