"""Loading as the code of a model sees it, which names each tensor once, with its shape.

What that code loads is recorded for the check of a folder, shards, adapters and rooflines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Shape
from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.adapters import Place
from baton.engine.runner.model.config import MoeConfig, NormConfig
from baton.engine.runner.model.linear import HeadLinears, Linear, TorchHeadLinears, TorchLinear
from baton.engine.runner.model.ops import Norm

# Size of an axis, or those of the parts that follow each other along it.
Axis = int | tuple[int, ...]
Axes = tuple[Axis, ...]
StoredAxes = Iterator[tuple[str, Axes]]
NO_NORM = NormConfig(epsilon=0.0)  # of a model without RMS norms
_CPU = torch.device("cpu")
_ONE = torch.ones(())
_LINEAR = TorchLinear(_ONE, None)


def parts_of(axis: Axis) -> tuple[int, ...]:
    return (axis,) if isinstance(axis, int) else axis


def shape_of(axes: Axes) -> Shape:
    return tuple(sum(parts_of(axis)) for axis in axes)


class StackedExpert(NamedTuple):
    """One expert of a tensor that stacks a matrix of each."""

    form: ExpertNames
    number: int
    num_experts: int

    def weight(self, name: str) -> str:
        return f"{name}.weight" if self.form.has_weight_suffix else name

    def stored(self, name: str, rows: Axis, columns: int, *, has_bias: bool) -> StoredAxes:
        matrix = (columns, rows) if self.form.is_transposed else (rows, columns)
        yield self.weight(name), (self.num_experts, *matrix)
        if has_bias:
            yield f"{name}_bias", (self.num_experts, rows)


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of the files that are one linear layer: their rows follow each other."""

    names: Sequence[str]
    rows: Sequence[Axis]  # of each; ranks divide each part
    columns: int
    has_bias: bool = False
    order: Sequence[int] | None = None  # of the first rows
    is_part: bool = False  # it has the rows in `order` alone
    keeps_dtype: bool = False  # it is not quantized at load
    is_sensitive: bool = False  # errors of quantization cost more than those of others
    place: Place | None = None  # of what adapters add to it
    stacked: StackedExpert | None = None  # its tensors have matrices of all experts

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Return the rows of all parts of all matrices."""
        return tuple(size for rows in self.rows for size in parts_of(rows))

    @property
    def num_rows(self) -> int:
        return len(self.order) if self.is_part and self.order else sum(self.row_parts)

    def shapes(self) -> Sequence[Shape]:
        return [shape_of((rows, self.columns)) for rows in self.rows]

    def stored(self) -> StoredAxes:
        for name, rows in zip(self.names, self.rows, strict=True):
            if self.stacked is not None:
                yield from self.stacked.stored(name, rows, self.columns, has_bias=self.has_bias)
            else:
                yield f"{name}.weight", (rows, self.columns)
                if self.has_bias:
                    yield f"{name}.bias", (rows,)


def expert_stacks(
    moe: MoeConfig, form: ExpertNames, hidden_size: int, expert: int
) -> tuple[Stack, Stack]:
    """Return the matrices of an expert in this form, by their names in a layer."""
    inner, size, number = moe.latent_size or hidden_size, moe.expert_size, None
    if "{expert}" not in form.down:
        number = StackedExpert(form, expert - moe.loaded_experts.start, len(moe.loaded_experts))
    rows: Axis = size
    if form.is_gated and len(form.gate_up) == 1:
        rows = 2 * size if form.is_interleaved else (size, size)
    gate_up = [name.format(expert=expert) for name in form.gate_up]
    down = form.down.format(expert=expert)
    first = Stack(gate_up, [rows] * len(gate_up), inner, moe.has_bias, stacked=number)
    if number is not None:
        number = number._replace(form=replace(form, is_interleaved=False))
    last = Stack([down], [inner], size, moe.has_bias, is_sensitive=True, stacked=number)
    return first, last


class WeightLoader:
    """Records what is loaded, and loads nothing: vectors are ones, and layers compute nothing.

    `TensorLoader` is derived from it, and loads tensors in a model's dtype.
    """

    def __init__(
        self,
        norm: NormConfig = NO_NORM,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
    ) -> None:
        self.axes: dict[str, Axes] = {}  # by tensor
        self.vectors: list[Shape] = []
        self.stacks: list[Stack] = []
        self._skipped: set[str] = set()
        self._norm_config = norm
        self._dtype = dtype
        self._device = device

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each recorded tensor as if no matrix was quantized."""
        return {name: tuple(map(sum, axes)) for name, axes in self.parts().items()}

    def parts(self) -> dict[str, Sequence[tuple[int, ...]]]:
        """Return the sizes of the parts along each axis of each tensor; most have one part."""
        return {name: list(map(parts_of, axes)) for name, axes in self.axes.items()}

    @property
    def num_loaded(self) -> int:
        """Return the recorded numbers."""
        loaded = (shape for name, shape in self.shapes().items() if name not in self._skipped)
        return sum(map(math.prod, loaded))

    def norm(self, name: str, size: int, order: Sequence[int] | None = None) -> Norm:
        """Load a norm's weight. `order` permutes it."""
        config = self._norm_config
        weight = self.vector(f"{name}.weight", size) + config.weight_offset
        if order is not None:
            weight = weight[list(order)]
        if not config.rounds_once:
            weight = weight.to(self._dtype)
        return Norm(weight, config.epsilon, config.rounds_once, config.is_centered)

    def gated_norm(self, name: str, size: int, epsilon: float | None) -> Norm:
        """Load the weight of a norm whose output is multiplied by a gate."""
        weight = self.vector(name, size).to(self._dtype)
        return Norm(weight, self._norm_config.epsilon if epsilon is None else epsilon)

    def unweighted_norm(self, size: int) -> Norm:
        weight = torch.ones(size, device=self._device)
        return Norm(weight, self._norm_config.epsilon, rounds_once=True)

    def vector(self, name: str, *shape: int) -> Tensor:
        """Load a small tensor in float32."""
        self.axes[name] = shape
        self.vectors.append(shape)
        return _ONE.expand(shape)

    def matrix(self, stack: Stack, dtype: torch.dtype | None = None) -> Tensor:
        """Load a matrix, dequantized if necessary. None: in the dtype of linear layers."""
        self.linear(replace(stack, keeps_dtype=True))
        return _ONE.expand(stack.num_rows, stack.columns)

    def embedding(self, stack: Stack) -> Linear:
        """Load the embedding or LM head."""
        return self.linear(stack)

    def rows(self, stack: Stack) -> Linear:
        """Load a table of which rows alone are read: from the mapped file, if it is stored so."""
        return self.linear(stack)

    def linear(self, stack: Stack) -> Linear:
        self.axes.update(stack.stored())
        self.stacks.append(stack)
        return _LINEAR

    def split_linear(self, first: Stack, second: Stack) -> tuple[Linear, Linear]:
        """Load two parts of a matrix. The second one is not quantized at load."""
        return self.linear(first), self.linear(second)

    def head_linears(self, weights: Tensor) -> HeadLinears:
        """Make linear layers of the heads of a loaded matrix."""
        return TorchHeadLinears(_ONE)

    def linear_of(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Make a linear layer of a weight that is not in the files as it is."""
        return _LINEAR

    def split_columns(self, first: Linear, second: Linear, num_columns: int) -> Linear:
        """Return the sum of two layers, the first of which has the first columns."""
        return first

    def skip(self, name: str, *shape: int) -> None:
        """Name a tensor that is loaded elsewhere."""
        self.axes[name] = shape
        self._skipped.add(name)
