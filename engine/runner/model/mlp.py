"""Computes MLPs and mixtures of experts from the operations of `Ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.runner.model.layer_weights import ParallelMoe
from baton.engine.runner.model.linear import Moe
from baton.engine.runner.model.ops import MlpGate, Ops


def compute_moe(ops: Ops, moe: Moe, gate: MlpGate, hidden_states: Tensor) -> Tensor:
    """Return the output of the chosen experts and of the shared expert."""
    if moe.mixer is not None:
        output = moe.mixer.mix(hidden_states)
    else:
        routing = ops.route(hidden_states, moe.router)
        inputs = hidden_states if moe.latent is None else moe.latent[0](hidden_states)
        output = ops.mix_experts(moe, gate, inputs, routing)
        if moe.latent is not None:
            output = moe.latent[1](output)
    if moe.shared is not None:
        shared = ops.compute_mlp(moe.shared, gate, hidden_states)
        if moe.shared_gate is not None:
            shared = ops.multiply_sigmoid(shared, moe.shared_gate(hidden_states))
        output = ops.add(output, shared, 1.0)
    return output if moe.add_up is None else moe.add_up(output)


def compute_parallel(ops: Ops, both: ParallelMoe, gate: MlpGate, hidden_states: Tensor) -> Tensor:
    """Return the sum of the outputs of MLP and experts. The input is not normed."""
    dense = ops.compute_mlp(both.dense, gate, ops.rms_norm(hidden_states, both.dense_norm))
    routing = ops.route(ops.rms_norm(hidden_states, both.router_norm), both.experts.router)
    scales = both.expert_scales[routing.expert_ids]
    routing = routing._replace(weights=routing.weights * scales)
    inputs = ops.rms_norm(hidden_states, both.experts_norm)
    mixed = ops.mix_experts(both.experts, gate, inputs, routing)
    if both.experts.add_up is not None:
        dense, mixed = both.experts.add_up(torch.stack((dense, mixed)))
    mixed = ops.rms_norm(mixed, both.experts_output_norm)
    return ops.add(ops.rms_norm(dense, both.dense_output_norm), mixed, 1.0)
