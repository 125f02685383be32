"""Mixtures of experts that adapters change.

Tokens without an adapter are mixed as before. Those of an adapter go through one expert after the
other, whose linear layers add the adapter's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import ActiveAdapters, Adapter, Group, LowRankProducts
from baton.engine.runner.adapters.place import Place
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
    routers: WeakKeyDictionary[Adapter, Router] = field(default_factory=WeakKeyDictionary)

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
        routing = self.ops.route(inputs, self._router(adapter))
        return mix_experts(self.ops, moe, self.gate, inputs, routing)

    def _router(self, adapter: Adapter) -> Router:
        """Return the router of an adapter, whose weight is merged: it is small."""
        parts = adapter.parts.get(Place(self.layer, "router"), ())
        if not parts:
            return self.moe.router
        if adapter not in self.routers:
            weight = self.moe.router.weight.clone()
            for part in parts:
                weight += part.up.T.float() @ part.down.float()
            self.routers[adapter] = replace(self.moe.router, weight=weight)
        return self.routers[adapter]


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
