"""Mixture of experts: its weights, the choice of experts, and the torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.model.config import MoeConfig, Scoring

if TYPE_CHECKING:
    from engine.runner.model.ops import Gate, Linear, Ops


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


class Routing(NamedTuple):
    """Chosen experts of each token, best first, and their weights. Each is [tokens, top_k]."""

    expert_ids: Tensor  # int64
    weights: Tensor  # float32


def route(hidden_states: Tensor, router: Router) -> Routing:
    """Choose experts: the torch reference."""
    config = router.config
    logits = functional.linear(hidden_states.float(), router.weight, router.bias)
    scores = _scores(logits, config.scoring)
    choice = scores if router.correction_bias is None else scores + router.correction_bias
    if config.num_groups > 1:
        choice = _hide_other_groups(choice, config)
    expert_ids = choice.topk(config.top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if config.scoring is Scoring.SOFTMAX_OF_TOP:
        weights = weights.softmax(dim=-1)
    if config.normalizes:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Routing(expert_ids, weights * config.scale)


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if scoring is Scoring.SIGMOID else logits


def _hide_other_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """Set the scores outside the best groups to -inf. A group counts by its two best experts."""
    grouped = choice.unflatten(1, (config.num_groups, -1))
    num_best = min(2, grouped.shape[2])
    best = grouped.topk(num_best, dim=-1).values.sum(dim=-1).topk(config.top_groups).indices
    is_open = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    hidden: Tensor = grouped.masked_fill(~is_open[:, :, None], float("-inf"))
    return hidden.flatten(1)


def mix_experts(ops: Ops, moe: Moe, gate: Gate, hidden_states: Tensor, routing: Routing) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs: the torch reference."""
    dtype, output = hidden_states.dtype, torch.zeros_like(hidden_states)
    weights = routing.weights.to(dtype)
    for expert_id in routing.expert_ids.unique().tolist():
        tokens, ranks = torch.where(routing.expert_ids == expert_id)
        inputs, scales = hidden_states[tokens], weights[tokens, ranks, None]
        if moe.config.scales_input:
            output.index_add_(
                0, tokens, compute_mlp(ops, moe.experts[expert_id], gate, inputs * scales)
            )
        else:
            outputs = compute_mlp(ops, moe.experts[expert_id], gate, inputs) * scales
            output.index_add_(0, tokens, outputs)
    return output


def compute_mlp(ops: Ops, mlp: Mlp, gate: Gate, hidden_states: Tensor) -> Tensor:
    return mlp.down(ops.apply_gate(mlp.gate_up(hidden_states), gate))


def compute_moe(ops: Ops, moe: Moe, gate: Gate, hidden_states: Tensor) -> Tensor:
    """Return the output of the chosen experts and of the shared expert."""
    routing = ops.route(hidden_states, moe.router)
    output = ops.mix_experts(moe, gate, hidden_states, routing)
    if moe.shared is None:
        return output
    shared = compute_mlp(ops, moe.shared, gate, hidden_states)
    if moe.shared_gate is not None:
        shared = torch.sigmoid(moe.shared_gate(hidden_states)) * shared
    return ops.add(output, shared, 1.0)
