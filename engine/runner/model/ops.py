"""Operations of a decoder: their reference in plain torch, the base of all implementations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.config import Activation, MoeConfig, Scoring
from baton.engine.runner.model.linear import (
    ExpertChoice,
    HeadLinears,
    Linear,
    Mlp,
    Moe,
    Router,
    TorchHeadLinears,
    TorchLinear,
)
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.model.rope import Angles, rotate


class Peaks(NamedTuple):
    """Argmax and finiteness of each row of logits."""

    token_ids: Tensor  # argmax, the first of equal values; undefined in a row with a NaN
    are_finite: Tensor  # booleans: all logits of the row are finite


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm, or layer norm without a bias.

    With `rounds_once` the weight is float32, and only the product is rounded.
    """

    weight: Tensor
    epsilon: float
    rounds_once: bool = False
    is_centered: bool = False  # a layer norm, which rounds once
    group: RankGroup | None = None  # of ranks that have as many numbers of each token


@dataclass(frozen=True, slots=True)
class MlpGate:
    """Activation of an MLP. `alpha` and `limit` belong to CLAMPED_SWIGLU."""

    activation: Activation = Activation.SILU
    alpha: float = 0.0
    limit: float = 0.0


class Ops:
    """Operations of a decoder in plain torch, from which other implementations are derived.

    Each rounds to the dtype of its input.
    """

    copies_weights = False  # `linear` copies the weight, so that it can be a mapped file
    keeps_quantized = False  # quantized matrices are multiplied as they are

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        """Make a linear layer. It owns the tensors from then on, and can keep or copy them."""
        plain = weight.dequantize() if isinstance(weight, Quantized) else weight
        return TorchLinear(plain, bias)

    def head_linears(self, weights: Tensor) -> HeadLinears:
        """Make a linear layer for each head from [heads, rows, columns]."""
        return TorchHeadLinears(weights)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        """RMS norm of [tokens, size], or layer norm if the norm is one."""
        wide = hidden_states.float()
        if norm.is_centered:
            wide = wide - wide.mean(-1, keepdim=True)
        variance = wide.pow(2).mean(-1, keepdim=True)
        if norm.group is not None:
            variance = norm.group.all_reduce(variance) / norm.group.shard.size
        normed = wide * torch.rsqrt(variance + norm.epsilon)
        if norm.rounds_once:
            return (normed * norm.weight).to(hidden_states.dtype)
        return norm.weight * normed.to(hidden_states.dtype)

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        """RoPE of [tokens, heads, head_dim]. If `norm` is given, each head is RMS-normed first."""
        if norm is not None:
            heads = self.rms_norm(heads, norm)
        return rotate(heads, *angles)

    def apply_ropes(
        self, heads: tuple[Tensor, Tensor], norms: tuple[Norm | None, Norm | None], angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Return what `apply_rope` does for queries and keys, which have the same angles."""
        (query, key), (q_norm, k_norm) = heads, norms
        return self.apply_rope(query, q_norm, angles), self.apply_rope(key, k_norm, angles)

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        """[tokens, 2 * size] → [tokens, size]: function of the first half times the second.

        Without a gate it is the function of [tokens, size].
        """
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
        """Return [tokens, size] times the sigmoid of its gates, or of one gate per token.

        Can overwrite `hidden_states`.
        """
        return hidden_states * torch.sigmoid(gates)

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        """Return `hidden_states` + `output` * `scale`. Can overwrite `hidden_states`."""
        return hidden_states + (output if scale == 1.0 else output * scale)

    def add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """Return what `add` does, and its RMS norm. Can overwrite `hidden_states`."""
        hidden_states = self.add(hidden_states, output, scale)
        return hidden_states, self.rms_norm(hidden_states, norm)

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        """Choose the experts of each token. A token's choice depends only on the token."""
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
        """Return the weighted sum of the chosen experts' outputs, [tokens, hidden_size]."""
        return self.mix_one_by_one(moe, gate, hidden_states, routing)

    def mix_one_by_one(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        """Do what `mix_experts` does, one expert after the other."""
        dtype, output = hidden_states.dtype, torch.zeros_like(hidden_states)
        weights, loaded = routing.weights.to(dtype), moe.config.loaded_experts
        for expert_id in routing.expert_ids.unique().tolist():
            if expert_id not in loaded:
                continue
            expert = moe.experts[expert_id - loaded.start]
            tokens, ranks = torch.where(routing.expert_ids == expert_id)
            inputs, scales = hidden_states[tokens], weights[tokens, ranks, None]
            if moe.config.scales_input:
                output.index_add_(0, tokens, self.compute_mlp(expert, gate, inputs * scales))
            else:
                outputs = self.compute_mlp(expert, gate, inputs) * scales
                output.index_add_(0, tokens, outputs)
        return output

    def compute_mlp(self, mlp: Mlp, gate: MlpGate, hidden_states: Tensor) -> Tensor:
        return mlp.down(self.apply_gate(mlp.gate_up(hidden_states), gate))

    def find_peaks(self, logits: Tensor) -> Peaks:
        """Return argmax and finiteness of each row of [rows, vocab_size] in float32."""
        # Both propagate NaN. They are ten times faster than `aminmax`.
        lowest, highest = logits.amin(dim=-1), logits.amax(dim=-1)
        return Peaks(_argmax(logits), lowest.isfinite() & highest.isfinite())


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax of each row. On the CPU numpy is ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


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
