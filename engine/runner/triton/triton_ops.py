"""Operations of a decoder in Triton. Products of plain matrices are torch's, or batch-invariant."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.linear import ExpertChoice, HeadLinears, Linear, Moe, Router
from baton.engine.runner.model.ops import MlpGate, Norm, Ops, Peaks
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.triton.elementwise_kernels import (
    add_and_norm_kernel,
    add_kernel,
    find_peaks_kernel,
    gate_kernel,
    multiply_sigmoid_kernel,
    rms_norm_kernel,
    rope_kernel,
)
from baton.engine.runner.triton.launching import PIECE_COLUMNS, launch, pieces, row_contiguous
from baton.engine.runner.triton.products.matrix_layout import pack
from baton.engine.runner.triton.products.plain_linear import PlainHeadLinears, PlainLinear
from baton.engine.runner.triton.products.triton_experts import (
    AddToExperts,
    Experts,
    choose_experts,
    join_experts,
    multiply_experts,
    sort_rows,
    sum_experts,
)
from baton.engine.runner.triton.products.triton_linear import make_linear

PEAK_COLUMNS = 4096  # of logits, that a program reads at a time
THREAD_COLUMNS = 32  # of a row that one program computes, per thread
MAX_ROPE_NUMBERS = 2048  # of half the heads in a program


class TritonOps(Ops):
    """Operations with kernels. Torch multiplies plain matrices, by the GPU vendor's library."""

    keeps_quantized = True

    def __init__(self) -> None:
        self._experts: WeakKeyDictionary[Moe, Experts | None] = WeakKeyDictionary()

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            return super().linear(weight, bias)
        return make_linear(pack(weight), bias, weight.numbers.device)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        if norm.is_centered:
            return super().rms_norm(hidden_states, norm)
        src = row_contiguous(hidden_states)
        num_rows, size = src.shape
        dst = torch.empty_like(src, memory_format=torch.contiguous_format)
        launch(
            rms_norm_kernel,
            (num_rows,),
            dst,
            src,
            norm.weight,
            src.stride(0),
            size,
            norm.epsilon,
            rounds_once=norm.rounds_once,
            padded_size=triton.next_power_of_2(size),
            num_warps=_row_warps(size),
        )
        return dst

    def add_and_norm(
        self, hidden_states: Tensor, output: Tensor, scale: float, norm: Norm
    ) -> tuple[Tensor, Tensor]:
        if norm.is_centered:
            return super().add_and_norm(hidden_states, output, scale, norm)
        src, output = row_contiguous(hidden_states), row_contiguous(output)
        num_rows, size = src.shape
        dst = torch.empty_like(src, memory_format=torch.contiguous_format)
        normed = torch.empty_like(dst)
        launch(
            add_and_norm_kernel,
            (num_rows,),
            dst,
            normed,
            src,
            output,
            norm.weight,
            src.stride(0),
            output.stride(0),
            size,
            scale,
            norm.epsilon,
            rounds_once=norm.rounds_once,
            padded_size=triton.next_power_of_2(size),
            num_warps=_row_warps(size),
        )
        return dst, normed

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        return _apply_ropes(heads, None, (norm, norm), angles)[0]

    def apply_ropes(
        self, heads: tuple[Tensor, Tensor], norms: tuple[Norm | None, Norm | None], angles: Angles
    ) -> tuple[Tensor, Tensor]:
        if not _are_alike(*norms):
            return super().apply_ropes(heads, norms, angles)
        return _apply_ropes(*heads, norms, angles)

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        if not gate.activation.is_gated:
            return super().apply_gate(gate_up, gate)
        gate_up = row_contiguous(gate_up)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        dst = gate_up.new_empty(num_rows, size)
        launch(
            gate_kernel,
            pieces(dst),
            dst,
            gate_up,
            gate_up.stride(0),
            size,
            gate.alpha,
            gate.limit,
            activation=gate.activation.value,
            num_columns=PIECE_COLUMNS,
        )
        return dst

    def multiply_sigmoid(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        src, gates = row_contiguous(hidden_states), row_contiguous(gates)
        dst = torch.empty_like(src, memory_format=torch.contiguous_format)
        launch(
            multiply_sigmoid_kernel,
            pieces(dst),
            dst,
            src,
            gates,
            src.stride(0),
            gates.stride(0),
            src.shape[1],
            is_scalar=gates.shape[1] == 1,
            num_columns=PIECE_COLUMNS,
        )
        return dst

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        src, output = row_contiguous(hidden_states), row_contiguous(output)
        dst = torch.empty_like(src, memory_format=torch.contiguous_format)
        launch(
            add_kernel,
            pieces(dst),
            dst,
            src,
            output,
            src.stride(0),
            output.stride(0),
            src.shape[1],
            scale,
            num_columns=PIECE_COLUMNS,
        )
        return dst

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        logits = self.linear(router.weight, router.bias)(hidden_states.float())
        return choose_experts(logits, router)

    def mix_experts(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        experts = self.join_experts(moe) if gate.activation.is_gated else None
        if experts is None:
            return self.mix_one_by_one(moe, gate, hidden_states, routing)
        return self.mix_joined_experts(experts, moe, gate, hidden_states, routing)

    def mix_joined_experts(
        self,
        experts: Experts,
        moe: Moe,
        gate: MlpGate,
        hidden_states: Tensor,
        routing: ExpertChoice,
        add: AddToExperts | None = None,
    ) -> Tensor:
        """Return the output of experts. `add` is called after each of their products."""
        rows = sort_rows(experts, routing, hidden_states.dtype)
        weights, scales_input = routing.weights.contiguous(), moe.config.scales_input
        scales = weights if scales_input else None
        gate_up = multiply_experts(experts.gate_up, hidden_states, rows, scales)
        if add is not None:
            add(hidden_states, gate_up, rows, scales, is_down=False)
        gated = self.apply_gate(gate_up, gate)
        outputs = multiply_experts(experts.down, gated, rows, is_down=True)
        if add is not None:
            add(gated, outputs, rows, None, is_down=True)
        return sum_experts(outputs, weights, weighs=not scales_input)

    def waits_for_experts(self, moe: Moe) -> bool:
        """Return whether experts are computed one by one, so that the CPU reads their ids."""
        return self.join_experts(moe) is None

    def join_experts(self, moe: Moe) -> Experts | None:
        """Return the experts as the kernels read them. None: they cannot be computed together."""
        if moe not in self._experts:
            self._experts[moe] = join_experts(moe.experts)
        return self._experts[moe]

    def find_peaks(self, logits: Tensor) -> Peaks:
        logits = row_contiguous(logits)
        num_rows, size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        are_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
        launch(
            find_peaks_kernel,
            (num_rows,),
            token_ids,
            are_finite,
            logits,
            logits.stride(0),
            size,
            num_columns=PEAK_COLUMNS,
        )
        return Peaks(token_ids, are_finite)


class BatchInvariantOps(TritonOps):
    """Operations with products whose bits do not depend on the other tokens."""

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        if isinstance(weight, Tensor):
            return PlainLinear(weight.contiguous(), bias)
        return super().linear(weight, bias)

    def head_linears(self, weights: Tensor) -> HeadLinears:
        return PlainHeadLinears(weights.contiguous())


def _are_alike(one: Norm | None, other: Norm | None) -> bool:
    """Return whether a launch can apply both: they differ in their weights at most."""
    if one is None or other is None:
        return one is other
    return (one.epsilon, one.rounds_once) == (other.epsilon, other.rounds_once)


def _apply_ropes(
    query: Tensor, key: Tensor | None, norms: tuple[Norm | None, Norm | None], angles: Angles
) -> tuple[Tensor, Tensor]:
    """Launch RoPE of queries, and of keys if there are any."""
    query = row_contiguous(query)
    num_tokens, num_heads, head_dim = query.shape
    num_key_heads = 0 if key is None else key.shape[1]
    key = query if key is None else row_contiguous(key)
    cos, sin = (row_contiguous(each) for each in angles)
    padded_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = min(triton.next_power_of_2(num_heads), max(1, MAX_ROPE_NUMBERS // padded_half))
    query_dst = query.new_empty(query.shape)
    key_dst = query.new_empty(num_tokens, num_key_heads, head_dim) if num_key_heads else query_dst
    q_norm, k_norm = norms
    launch(
        rope_kernel,
        (num_tokens, triton.cdiv(num_heads, tile_heads) + triton.cdiv(num_key_heads, tile_heads)),
        query_dst,
        key_dst,
        query,
        key,
        query if q_norm is None else q_norm.weight,
        key if k_norm is None else k_norm.weight,
        cos,
        sin,
        query.stride()[:2],
        key.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        num_heads,
        num_key_heads,
        head_dim // 2,
        0.0 if q_norm is None else q_norm.epsilon,
        has_norm=q_norm is not None,
        rounds_once=q_norm is not None and q_norm.rounds_once,
        tile_heads=tile_heads,
        padded_half=padded_half,
    )
    return query_dst, key_dst


def _row_warps(size: int) -> int:
    """Return the warps of a program that computes a row of this size."""
    num_warps: int = triton.next_power_of_2(size) // (32 * THREAD_COLUMNS)
    return min(max(4, num_warps), 16)
