"""Mixtures of experts that adapters change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import ActiveAdapters, ExpertPass, LowRankProducts
from baton.engine.runner.model.adapters import Adapter, Group, Part, Place
from baton.engine.runner.model.linear import ExpertChoice, Linear, Mlp, Moe, Router
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
        groups, products, router = self.active.groups, self.active.products, self.moe.router
        routing = products.route(self.ops, router, self.layer, hidden_states, groups)
        if routing is None:
            routing = self._route_by_group(hidden_states)
        own = ExpertPass(self.ops, self.moe, self.layer, self.gate, hidden_states, routing)
        output = products.mix_experts(own, groups)
        return self._mix_by_group(own) if output is None else output

    def _route_by_group(self, hidden_states: Tensor) -> ExpertChoice:
        routing = self.ops.route(hidden_states, self.moe.router)
        for adapter, tokens in self.active.groups:
            router = adapter.routers.get(self.layer)
            if router is not None:
                own = self.ops.route(hidden_states[tokens], router)
                routing.expert_ids[tokens], routing.weights[tokens] = own
        return routing

    def _mix_by_group(self, own: ExpertPass) -> Tensor:
        """Compute tokens without an adapter as before, others one expert after the other."""
        inputs, routing = own.inputs, own.routing
        is_plain = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
        output = torch.empty_like(inputs)
        for adapter, tokens in self.active.groups:
            is_plain[tokens] = False
            experts = _ExpertsWith(self.moe.experts, self.layer, self.active.products, adapter)
            moe, choice = replace(self.moe, experts=experts), _choice_of(routing, tokens)
            output[tokens] = self.ops.mix_one_by_one(moe, self.gate, inputs[tokens], choice)
        plain = is_plain.nonzero()[:, 0]
        if len(plain):
            choice = _choice_of(routing, plain)
            output[plain] = self.ops.mix_experts(self.moe, self.gate, inputs[plain], choice)
        return output


def _choice_of(routing: ExpertChoice, tokens: Tensor) -> ExpertChoice:
    return ExpertChoice(routing.expert_ids[tokens], routing.weights[tokens])


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
