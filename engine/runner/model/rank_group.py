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
    has_whole_experts: bool = False  # some of them; else a part of each

    def part_of(self, count: int) -> range:
        """Return the own ones of `count` heads or rows: with fewer than ranks, some share one."""
        first, end = (rank * count // self.size for rank in (self.rank, self.rank + 1))
        return range(first, max(end, first + 1))

    def rows_of(self, num_rows: int) -> range:
        """Return the own rows of a vocabulary. The last rank can have fewer."""
        size = -(-num_rows // self.size)
        return range(min(num_rows, self.rank * size), min(num_rows, (self.rank + 1) * size))


class RankGroup(Protocol):
    """Collective operations, which all ranks call in the same order. One rank alone has none."""

    @property
    def shard(self) -> Shard: ...

    @property
    def address(self) -> int:
        """Return that of the struct RankLinks for native kernels; 0: there is none."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks. Can overwrite the argument."""
        ...

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        """Return, in the first rank, the products of all ranks' parts, [tokens, num_rows].

        The hidden states are those of the first rank.
        """
        ...


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """Implements `Linear` by a part of the columns in each rank."""

    part: Linear
    group: RankGroup

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.group.all_reduce(self.part(hidden_states))

    def rows(self, row_ids: Tensor) -> Tensor:
        raise TypeError("only the rows of an embedding are looked up")


@dataclass(frozen=True, slots=True)
class DividedVocabulary:
    """Implements `Linear` by a part of the rows in each rank, for embeddings and the LM head."""

    part: Linear
    num_rows: int  # of all ranks
    group: RankGroup

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return self.group.multiply(self.part, hidden_states, self.num_rows)

    def rows(self, row_ids: Tensor) -> Tensor:
        own = self.group.shard.rows_of(self.num_rows)
        is_own = (row_ids >= own.start) & (row_ids < own.stop)
        found = self.part.rows((row_ids - own.start).where(is_own, 0))
        return self.group.all_reduce(found.masked_fill_(~is_own[:, None], 0))


def own_part(linear: Linear) -> Linear:
    """Return the part of a linear layer that the rank computes."""
    return linear.part if isinstance(linear, SummedLinear) else linear
