"""Linear layers, MLPs and mixtures of experts: their weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.model.config import MoeConfig

# Linear layers of the same shape without biases, one for each head: [tokens, heads, columns] →
# [tokens, heads, rows]; as with `Linear`, row by row.
HeadLinears = Callable[[Tensor], Tensor]


class Linear(Protocol):
    """Linear layer, or embedding table, whose weight is in the layout of its implementation."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[tokens, columns] → [tokens, rows]. An output row depends only on its own token."""
        ...

    def rows(self, row_ids: Tensor) -> Tensor:
        """Return rows of the weight, dequantized, as an embedding lookup does."""
        ...


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """Implements `Linear` in plain torch."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return functional.linear(hidden_states, self.weight, self.bias)

    def rows(self, row_ids: Tensor) -> Tensor:
        return functional.embedding(row_ids, self.weight)


@dataclass(frozen=True, slots=True)
class TorchHeadLinears:
    weights: Tensor  # [heads, rows, columns]

    def __call__(self, heads: Tensor) -> Tensor:
        return torch.bmm(heads.transpose(0, 1), self.weights.mT).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """Implements `Linear` by the sum of two layers, the first of which has the first columns."""

    first: Linear
    second: Linear
    num_columns: int  # of the first one
    add: Callable[[Tensor, Tensor, float], Tensor]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        sizes = [self.num_columns, hidden_states.shape[1] - self.num_columns]
        first, second = torch.split(hidden_states, sizes, dim=1)
        return self.add(self.first(first), self.second(second), 1.0)

    def rows(self, row_ids: Tensor) -> Tensor:
        return torch.cat((self.first.rows(row_ids), self.second.rows(row_ids)), dim=1)


@dataclass(frozen=True, slots=True)
class ExtendedLinear:
    """Implements `Linear` by the rows of a layer, then those of two layers in turn."""

    plain: Linear
    down: Linear
    up: Linear

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return torch.cat((self.plain(hidden_states), self.up(self.down(hidden_states))), dim=1)

    def rows(self, row_ids: Tensor) -> Tensor:
        raise TypeError("only the rows of an embedding are looked up")


@dataclass(frozen=True, slots=True)
class SparseGate:
    """Implements `Linear` by the rows of gates, then of up: only outstanding gates are above zero.

    The mean of a token's gates and some standard deviations are taken from each.
    """

    gate_up: Linear
    num_gates: int  # of all ranks
    deviations: float
    add_up: Callable[[Tensor], Tensor] | None  # sums of ranks; None: these gates are all

    def __call__(self, hidden_states: Tensor) -> Tensor:
        gate_up = self.gate_up(hidden_states)
        gates = gate_up[:, : gate_up.shape[1] // 2]
        above = gates.float()
        above = above - self._mean(above)
        above = above - self._mean(above.square()).sqrt() * self.deviations
        gates.copy_(above.relu_())
        return gate_up

    def rows(self, row_ids: Tensor) -> Tensor:
        raise TypeError("only the rows of an embedding are looked up")

    def _mean(self, numbers: Tensor) -> Tensor:
        total = numbers.sum(-1, keepdim=True)
        return (total if self.add_up is None else self.add_up(total)) / self.num_gates


def parts_of(linear: Linear) -> Sequence[Linear]:
    """Return the layers that a layer consists of, or itself."""
    if isinstance(linear, SplitLinear):
        return linear.first, linear.second
    if isinstance(linear, ExtendedLinear):
        return linear.plain, linear.down, linear.up
    return [linear.gate_up if isinstance(linear, SparseGate) else linear]


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear  # rows of the gate, then of up
    down: Linear


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses the experts of a token. Weights and biases are float32."""

    config: MoeConfig
    weight: Tensor  # [experts, hidden_size]
    bias: Tensor | None
    correction_bias: Tensor | None


class ExpertMixer(Protocol):
    """Computes the experts of a layer in another way than `Ops`."""

    def mix(self, hidden_states: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        ...


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Moe:
    config: MoeConfig
    router: Router
    experts: Sequence[Mlp]  # those of `config.loaded_experts`
    shared: Mlp | None
    shared_gate: Linear | None
    latent: tuple[Linear, Linear] | None = None  # into the experts' smaller space, and out of it
    mixer: ExpertMixer | None = None  # None: the experts are computed by `Ops`
    add_up: Callable[[Tensor], Tensor] | None = None  # the outputs of ranks; None: these are all


class ExpertChoice(NamedTuple):
    """Chosen experts of each token, best first, and their weights. Each is [tokens, top_k]."""

    expert_ids: Tensor  # int64
    weights: Tensor  # float32
