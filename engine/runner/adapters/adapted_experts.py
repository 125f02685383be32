"""Mixtures of experts that adapters change.

Tokens without an adapter are mixed as before. Those of an adapter go through one expert after the
other, whose linear layers add the adapter's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import ActiveAdapters, Adapter, Group, LowRankProducts
from baton.engine.runner.adapters.place import Part, Place
from baton.engine.runner.model.linear import Linear, Mlp, Moe, Router
from baton.engine.runner.model.mlp import mix_experts
from baton.engine.runner.model.ops import MlpGate, Ops


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """Implements `ExpertMixer`."""

    moe: Moe
    layer: int
    ops: Ops
    gate: MlpGate
    active: ActiveAdapters

    def mix(self, hidden_states: Tensor) -> Tensor:
        is_plain = torch.ones(len(hidden_states), dtype=torch.bool, device=hidden_states.device)
        output = torch.empty_like(hidden_states)
        for group in self.active.groups:
            is_plain[group.tokens] = False
            output[group.tokens] = self._mix_group(hidden_states[group.tokens], group.adapter)
        plain = is_plain.nonzero()[:, 0]
        if len(plain):
            inputs = hidden_states[plain]
            routing = self.ops.route(inputs, self.moe.router)
            output[plain] = self.ops.mix_experts(self.moe, self.gate, inputs, routing)
        return output

    def _mix_group(self, inputs: Tensor, adapter: Adapter) -> Tensor:
        experts = _ExpertsWith(self.moe.experts, self.layer, self.active.products, adapter)
        moe = replace(self.moe, experts=experts)
        router = adapter.routers.get(self.layer, self.moe.router)
        return mix_experts(self.ops, moe, self.gate, inputs, self.ops.route(inputs, router))


def merge_router(router: Router, parts: Sequence[Part]) -> Router:
    """Return a router with the product of an adapter: its weight is small."""
    weight = router.weight.clone()
    for part in parts:
        weight += (part.up.T.float() @ part.down.float()).to(weight)
    return replace(router, weight=weight)


@dataclass(frozen=True, slots=True)
class _ExpertsWith(Sequence[Mlp]):
    """Experts of tokens with the same adapter."""

    base: Sequence[Mlp]
    layer: int
    products: LowRankProducts
    adapter: Adapter

    def __len__(self) -> int:
        return len(self.base)

    @overload
    def __getitem__(self, expert: int) -> Mlp: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[Mlp]: ...
    def __getitem__(self, expert: int | slice) -> Mlp | Sequence[Mlp]:
        if isinstance(expert, slice):
            return [self[each] for each in range(len(self))[expert]]
        mlp = self.base[expert]
        return Mlp(
            self._adapt(mlp.gate_up, Place(self.layer, "gate_up", expert)),
            self._adapt(mlp.down, Place(self.layer, "down", expert)),
        )

    def _adapt(self, base: Linear, place: Place) -> Linear:
        if place not in self.adapter.parts:
            return base
        return _LinearWith(base, place, self.products, self.adapter)


@dataclass(frozen=True, slots=True)
class _LinearWith:
    """Implements `Linear` for tokens with the same adapter."""

    base: Linear
    place: Place
    products: LowRankProducts
    adapter: Adapter

    def __call__(self, hidden_states: Tensor) -> Tensor:
        tokens = torch.arange(len(hidden_states), device=hidden_states.device)
        outputs = self.base(hidden_states)
        self.products.add(self.place, [Group(self.adapter, tokens)], hidden_states, outputs)
        return outputs

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.base.rows(row_ids)
