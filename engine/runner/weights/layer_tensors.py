"""Tensors of one layer, by the names that they have in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.runner.families.family import TensorNames
from baton.engine.runner.model.adapters import Place
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.model.rank_group import RankGroup, SummedLinear
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.tensor_names import TensorMap


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Loads them: of linear layers that ranks divide, the part of the rank."""

    map: TensorMap
    loader: WeightLoader
    index: int
    group: RankGroup | None

    @property
    def config(self) -> ModelConfig:
        return self.map.config.of_layer(self.index)

    @property
    def names(self) -> TensorNames:
        return self.map.names.of_layer(self.map.config.layers[self.index])

    @property
    def is_first(self) -> bool:
        """Return whether the rank is the first one."""
        return self.group is None or self.group.shard.rank == 0

    def full(self, name: str) -> str:
        return self.map.in_layer(self.index, name)

    def place(self, name: str, number: int | None = None) -> Place:
        return Place(self.index, name, number)

    def in_layer(self, stack: Stack) -> Stack:
        return replace(stack, names=[self.full(name) for name in stack.names])

    def vector(self, name: str, *shape: int) -> Tensor:
        return self.loader.vector(self.full(name), *shape)

    def norm(self, name: str, size: int, order: Sequence[int] | None = None) -> Norm:
        return self.loader.norm(self.full(name), size, order)

    def linear(self, stack: Stack) -> Linear:
        return self.loader.linear(self.in_layer(stack))

    def own_columns(self, stack: Stack) -> Linear:
        """Load a linear layer of which each rank has some columns, and the first one the bias."""
        return self.linear(replace(stack, has_bias=stack.has_bias and self.is_first))

    def summed(self, part: Linear) -> Linear:
        return part if self.group is None else SummedLinear(part, self.group)

    def wide_matrix(self, stack: Stack) -> Tensor:
        """Load a matrix in float32."""
        return self.loader.matrix(self.in_layer(stack), torch.float32)
