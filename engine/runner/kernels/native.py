"""Native kernels for bfloat16 on the CPU: the loaded library and `Ops`.

Tensors are passed as addresses. The caller checks their shapes and keeps them alive during the
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from baton.engine.runner.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import (
    ArgmaxArgs,
    GateArgs,
    HeadLinearArgs,
    LinearArgs,
    NormParams,
    PackArgs,
    PackedMatrix,
    RmsNormArgs,
    RopeAngles,
    RopeArgs,
    SigmoidArgs,
    load_library,
)
from baton.engine.runner.kernels.native_experts import NativeExperts, NativeMoe, gate_params
from baton.engine.runner.model.experts import ExpertChoice, Mlp, Moe, Router
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mlp import mix_experts
from baton.engine.runner.model.ops import MlpGate, Norm, Peaks
from baton.engine.runner.model.rope import Angles
from baton.engine.runner.weights.quantize import Quantized

_SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MAX_GROUP = 256  # of 16-bit scales: their sums of a group are 32-bit integers


class Kernels:
    """Loaded kernel library. Results are bit-identical for any number of threads."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.path = path
        self.library = load_library(path)
        self.num_threads = num_threads


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def norm_params(norm: Norm | None) -> NormParams:
    if norm is None:
        return NormParams()
    return NormParams(norm.weight.data_ptr(), norm.epsilon, norm.rounds_once)


class NativeOps:
    """Implements `Ops`."""

    copies_weights = True

    def __init__(self, kernels: Kernels) -> None:
        self._library = kernels.library
        self._num_threads = kernels.num_threads
        self._kernels = kernels
        self._moe = NativeMoe(kernels.library, kernels.num_threads)
        self._experts: WeakKeyDictionary[Moe, NativeExperts | None] = WeakKeyDictionary()

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> NativeLinear:
        """Pack a copy of the weight, on huge pages where available."""
        if isinstance(weight, Quantized):
            scales = weight.scales.float() if weight.group > _MAX_GROUP else weight.scales
            tensors: tuple[Tensor, ...] = weight.numbers, scales, weight.zeros
            bits, group_size, column_order = weight.bits, weight.group, weight.order
            is_mxfp4, scale_type = weight.is_mxfp4, _SCALE_TYPES[scales.dtype]
        else:
            tensors = (weight,)
            bits, group_size, column_order, is_mxfp4, scale_type = 16, 0, None, False, 0
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        num_rows, num_columns = tensors[0].shape
        if bits == 16 and num_columns % 2:
            raise ValueError(f"a matrix of {num_columns} columns: the kernels need an even number")
        matrix = PackedMatrix(
            packed=None,
            bias=address(bias),
            bits=bits,
            num_rows=num_rows,
            num_columns=num_columns,
            group_size=group_size,
            is_mxfp4=is_mxfp4,
            scale_type=scale_type,
        )
        memory = huge_page_memory(self._library.baton_packed_bytes(matrix))
        packed = torch.frombuffer(memory, dtype=torch.uint8)
        matrix.packed = packed.data_ptr()
        addresses = dict(zip(("weights", "scales", "zeros"), map(address, tensors), strict=False))
        self._library.baton_pack(
            PackArgs(matrix=matrix, **addresses, num_threads=self._num_threads)
        )
        return NativeLinear(self._kernels, matrix, (packed, bias), column_order)

    def head_linears(self, weights: Tensor) -> NativeHeadLinears:
        linears = [self.linear(weight, None) for weight in weights]
        return NativeHeadLinears.of(self._kernels, linears)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        num_rows, size = hidden_states.shape
        if hidden_states.stride(1) != 1:
            hidden_states = hidden_states.contiguous()
        output = torch.empty(num_rows, size, dtype=hidden_states.dtype)
        self._library.baton_rms_norm(
            RmsNormArgs(
                src=hidden_states.data_ptr(),
                norm=norm_params(norm),
                dst=output.data_ptr(),
                num_rows=num_rows,
                size=size,
                src_stride=hidden_states.stride(0),
                num_threads=self._num_threads,
            )
        )
        return output

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        num_tokens, num_heads, head_dim = heads.shape
        if heads.stride()[1:] != (head_dim, 1):
            heads = heads.contiguous()
        cosines, sines = (angle.contiguous() for angle in angles)
        output = torch.empty(heads.shape, dtype=heads.dtype)
        self._library.baton_rope(
            RopeArgs(
                src=heads.data_ptr(),
                norm=norm_params(norm),
                angles=RopeAngles(cosines.data_ptr(), sines.data_ptr()),
                dst=output.data_ptr(),
                src_stride=heads.stride(0),
                num_tokens=num_tokens,
                num_heads=num_heads,
                head_dim=head_dim,
                num_threads=self._num_threads,
            )
        )
        return output

    def apply_gate(self, gate_up: Tensor, gate: MlpGate) -> Tensor:
        gate_up = gate_up.contiguous()
        num_tokens, both = gate_up.shape
        output = torch.empty(num_tokens, both // 2, dtype=gate_up.dtype)
        self._library.baton_gate(
            GateArgs(
                src=gate_up.data_ptr(),
                dst=output.data_ptr(),
                num_tokens=num_tokens,
                size=both // 2,
                gate=gate_params(gate),
                num_threads=self._num_threads,
            )
        )
        return output

    def multiply_sigmoid(self, hidden_states: Tensor, gates: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        if gates.stride(1) != 1:
            gates = gates.contiguous()
        num_rows, size = hidden_states.shape
        self._library.baton_multiply_sigmoid(
            SigmoidArgs(
                dst=hidden_states.data_ptr(),
                gates=gates.data_ptr(),
                num_rows=num_rows,
                size=size,
                gate_stride=gates.stride(0),
                has_one_gate=gates.shape[1] == 1,
                num_threads=self._num_threads,
            )
        )
        return hidden_states

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        hidden_states, output = hidden_states.contiguous(), output.contiguous()
        count = hidden_states.numel()
        self._library.baton_add(
            hidden_states.data_ptr(), output.data_ptr(), count, scale, self._num_threads
        )
        return hidden_states

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        return self._moe.route(hidden_states, router)

    def mix_experts(
        self, moe: Moe, gate: MlpGate, hidden_states: Tensor, routing: ExpertChoice
    ) -> Tensor:
        if moe not in self._experts:
            self._experts[moe] = native_experts(moe.experts)
        experts = self._experts[moe]
        if experts is None:
            return mix_experts(self, moe, gate, hidden_states, routing)
        scales_input = moe.config.scales_input
        return self._moe.mix(experts, gate, hidden_states, routing, scales_input=scales_input)

    def find_peaks(self, logits: Tensor) -> Peaks:
        logits = logits.contiguous()
        num_rows, size = logits.shape
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        are_finite = torch.empty(num_rows, dtype=torch.bool)
        self._library.baton_argmax(
            ArgmaxArgs(
                logits=logits.data_ptr(),
                indices=token_ids.data_ptr(),
                are_finite=are_finite.data_ptr(),
                num_rows=num_rows,
                size=size,
                num_threads=self._num_threads,
            )
        )
        return Peaks(token_ids, are_finite)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Implements `Linear` with packed weights, in bf16 or quantized."""

    kernels: Kernels
    matrix: PackedMatrix
    owners: tuple[Tensor | None, ...]  # of the memory that `matrix` points to
    column_order: Tensor | None  # of the activations

    def __call__(self, hidden_states: Tensor) -> Tensor:
        order = self.column_order
        hidden_states = hidden_states.contiguous() if order is None else hidden_states[:, order]
        num_tokens = len(hidden_states)
        output = torch.empty(num_tokens, self.matrix.num_rows, dtype=hidden_states.dtype)
        self.kernels.library.baton_linear(
            LinearArgs(
                matrix=self.matrix,
                src=hidden_states.data_ptr(),
                dst=output.data_ptr(),
                num_tokens=num_tokens,
                num_threads=self.kernels.num_threads,
            )
        )
        return output

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        output = torch.empty(len(row_ids), self.matrix.num_columns, dtype=torch.bfloat16)
        self.kernels.library.baton_get_rows(
            self.matrix, row_ids.data_ptr(), len(row_ids), output.data_ptr()
        )
        return output


@dataclass(frozen=True, slots=True)
class NativeHeadLinears:
    """Implements `HeadLinears`."""

    kernels: Kernels
    matrices: ctypes.Array[PackedMatrix]
    owners: Sequence[NativeLinear]  # of the memory that `matrices` point to

    @classmethod
    def of(cls, kernels: Kernels, linears: Sequence[NativeLinear]) -> NativeHeadLinears:
        array = PackedMatrix * len(linears)
        return cls(kernels, array(*(linear.matrix for linear in linears)), linears)

    def __call__(self, heads: Tensor) -> Tensor:
        heads = heads.transpose(0, 1).contiguous()
        num_heads, num_tokens, _ = heads.shape
        output = torch.empty(num_heads, num_tokens, self.matrices[0].num_rows, dtype=heads.dtype)
        self.kernels.library.baton_head_linear(
            HeadLinearArgs(
                matrices=ctypes.addressof(self.matrices),
                src=heads.data_ptr(),
                dst=output.data_ptr(),
                num_heads=num_heads,
                num_tokens=num_tokens,
                num_threads=self.kernels.num_threads,
            )
        )
        return output.transpose(0, 1)


def native_experts(experts: Sequence[Mlp]) -> NativeExperts | None:
    """Return None if the kernels cannot compute these experts together."""
    matrices = [(native_matrix(mlp.gate_up), native_matrix(mlp.down)) for mlp in experts]
    gate_up = [matrix for matrix, _ in matrices if matrix is not None]
    down = [matrix for _, matrix in matrices if matrix is not None]
    if len(gate_up) < len(experts) or len(down) < len(experts):
        return None
    return NativeExperts.of(gate_up, down)


def native_matrix(linear: Linear) -> PackedMatrix | None:
    """Return None for a matrix that is not native or needs its columns reordered."""
    if isinstance(linear, NativeLinear) and linear.column_order is None:
        return linear.matrix
    return None
