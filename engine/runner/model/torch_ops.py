"""Reference implementation of the operations in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.config import Activation, MoeConfig, Scoring
from baton.engine.runner.model.linear import ExpertChoice, HeadLinears, Linear, Moe, Router
from baton.engine.runner.model.mlp import mix_experts
from baton.engine.runner.model.ops import MlpGate, Norm, Peaks
from baton.engine.runner.model.rope import Angles, rotate


class TorchOps:
    """Reference implementation in plain torch."""

    copies_weights = False
    keeps_quantized = False

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        plain = weight.dequantize() if isinstance(weight, Quantized) else weight
        return TorchLinear(plain, bias)

    def head_linears(self, weights: Tensor) -> HeadLinears:
        return TorchHeadLinears(weights)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        wide = hidden_states.float()
        variance = wide.pow(2).mean(-1, keepdim=True)
        if norm.group is not None:
            variance = norm.group.all_reduce(variance) / norm.group.shard.size
        normed = wide * torch.rsqrt(variance + norm.epsilon)
        if norm.rounds_once:
            return (normed * norm.weight).to(hidden_states.dtype)
        return norm.weight * normed.to(hidden_states.dtype)

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        if norm is not None:
            heads = self.rms_norm(heads, norm)
        return rotate(heads, *angles)

    def apply_ropes(
        self, heads: tuple[Tensor, Tensor], norms: tuple[Norm | None, Norm | None], angles: Angles
    ) -> tuple[Tensor, Tensor]:
        (query, key), (q_norm, k_norm) = heads, norms
        return self.apply_rope(query, q_norm, angles), self.apply_rope(key, k_norm, angles)

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        if gate.activation is Activation.SQUARED_RELU:
            return functional.relu(gate_up).square()
        first, up = gate_up.chunk(2, dim=-1)
        if gate.activation is Activation.SILU:
            return functional.silu(first) * up
        if gate.activation is Activation.GELU_TANH:
            return functional.gelu(first, approximate="tanh") * up
        first, up = first.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
        return (up + 1) * (first * torch.sigmoid(first * gate.alpha))

    def multiply_sigmoid(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        return hidden_states * torch.sigmoid(gates)

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        return hidden_states + (output if scale == 1.0 else output * scale)

    def add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        hidden_states = self.add(hidden_states, output, scale)
        return hidden_states, self.rms_norm(hidden_states, norm)

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
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
        return ExpertChoice(expert_ids, weights * config.scale)

    def mix_experts(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        return mix_experts(self, moe, gate, hidden_states, routing)

    def find_peaks(self, logits: Tensor) -> Peaks:
        # Both propagate NaN. They are ten times faster than `aminmax`.
        lowest, highest = logits.amin(dim=-1), logits.amax(dim=-1)
        return Peaks(_argmax(logits), lowest.isfinite() & highest.isfinite())


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row. On the CPU numpy is ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True)
class TorchLinear:
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


def _scores(logits: Tensor, scoring: Scoring) -> Tensor:
    if scoring is Scoring.SOFTMAX:
        return logits.softmax(dim=-1)
    return logits.sigmoid() if scoring is Scoring.SIGMOID else logits


def _hide_other_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """Set the scores outside the best groups to -inf. A group counts by its best experts."""
    grouped = choice.unflatten(1, (config.num_groups, -1))
    num_best = min(config.group_best, grouped.shape[2])
    best = grouped.topk(num_best, dim=-1).values.sum(dim=-1).topk(config.top_groups).indices
    is_open = torch.zeros_like(grouped[:, :, 0], dtype=torch.bool).scatter_(1, best, True)
    hidden: Tensor = grouped.masked_fill(~is_open[:, :, None], float("-inf"))
    return hidden.flatten(1)
