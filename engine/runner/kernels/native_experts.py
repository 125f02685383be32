"""Native kernel of mixtures of experts."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.kernels.abi import LowRankGroups, Struct
from baton.engine.runner.kernels.calls import Kernels, Workspace, gate_params
from baton.engine.runner.model.linear import ExpertChoice, Moe
from baton.engine.runner.model.ops import MlpGate

Matrices = ctypes.Array[Struct]  # PackedMatrix of the same shape and format
Experts = tuple[Matrices, Matrices]  # gate and up, and down of all experts of a layer


class AddedProducts(NamedTuple):
    """Products of adapters that the kernel adds to those of the experts."""

    groups: Struct  # LowRankGroups, with the places of gate and up
    down_adapters: int  # address of an array of LowRankAdapter
    hidden_bytes: int


NOTHING = AddedProducts(LowRankGroups(), 0, 0)


class ExpertMixing:
    """Calls of the kernel, with their intermediate results."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._workspace = Workspace()

    def mix(
        self,
        experts: Experts,
        moe: Moe,
        gate: MlpGate,
        hidden_states: Tensor,
        routing: ExpertChoice,
        added: AddedProducts = NOTHING,
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs."""
        hidden_states = hidden_states.contiguous()
        expert_ids, weights = routing.expert_ids.contiguous(), routing.weights.contiguous()
        output = torch.empty_like(hidden_states)
        num_tokens, top_k = expert_ids.shape
        gate_up, down = experts
        widths = down[0].num_rows, gate_up[0].num_rows, down[0].num_columns
        sizes = [2 * num_tokens * top_k * width for width in widths]
        narrow_buf, wide_buf, gated_buf, hidden_buf = self._workspace.split(
            *sizes, added.hidden_bytes
        )
        self._kernels.call(
            "baton_mix_experts",
            gate_up=ctypes.addressof(gate_up),
            down=ctypes.addressof(down),
            src=hidden_states,
            expert_ids=expert_ids,
            weights=weights,
            dst=output,
            narrow_buf=narrow_buf,
            wide_buf=wide_buf,
            gated_buf=gated_buf,
            num_tokens=num_tokens,
            first_expert=moe.config.loaded_experts.start,
            num_experts=len(gate_up),
            top_k=top_k,
            gate=gate_params(gate),
            groups=added.groups,
            down_adapters=added.down_adapters,
            hidden_buf=hidden_buf,
            scales_input=moe.config.scales_input,
        )
        return output
