"""MLPs and mixtures of experts: their weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from baton.engine.runner.model.config import MoeConfig
from baton.engine.runner.model.linear import Linear


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


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Moe:
    config: MoeConfig
    router: Router
    experts: Sequence[Mlp]
    shared: Mlp | None
    shared_gate: Linear | None


class ExpertChoice(NamedTuple):
    """Chosen experts of each token, best first, and their weights. Each is [tokens, top_k]."""

    expert_ids: Tensor  # int64
    weights: Tensor  # float32
