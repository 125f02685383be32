"""Native linear layers with packed weights: single ones, of heads, and of experts."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.runner.kernels.abi import PackedMatrix, Struct
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.native_experts import Experts, Matrices
from baton.engine.runner.model.linear import Linear, Mlp

FORMAT_FIELDS = (
    *("bits", "num_rows", "num_columns", "group_size"),
    *("is_mxfp4", "scale_type", "has_offsets", "is_centred", "activation_bits"),
)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Implements `Linear` with packed weights, in bf16 or quantized."""

    kernels: Kernels
    matrix: Struct  # PackedMatrix
    owners: tuple[Tensor | None, ...]  # own the memory that `matrix` points to
    column_order: Tensor | None  # permutes the activations

    def __call__(self, hidden_states: Tensor) -> Tensor:
        order = self.column_order
        hidden_states = hidden_states.contiguous() if order is None else hidden_states[:, order]
        num_tokens = len(hidden_states)
        output = torch.empty(num_tokens, self.matrix.num_rows, dtype=hidden_states.dtype)
        self.kernels.call(
            "baton_linear", matrix=self.matrix, src=hidden_states, dst=output, num_tokens=num_tokens
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
    matrices: Matrices
    owners: Sequence[NativeLinear]  # own the memory that `matrices` point to

    def __call__(self, heads: Tensor) -> Tensor:
        heads = heads.transpose(0, 1).contiguous()
        num_heads, num_tokens, _ = heads.shape
        output = torch.empty(num_heads, num_tokens, self.matrices[0].num_rows, dtype=heads.dtype)
        self.kernels.call(
            "baton_head_linear",
            matrices=ctypes.addressof(self.matrices),
            src=heads,
            dst=output,
            num_heads=num_heads,
            num_tokens=num_tokens,
        )
        return output.transpose(0, 1)


def native_experts(experts: Sequence[Mlp]) -> Experts | None:
    """Return None if the kernels cannot compute these experts together."""
    gate_up = _alike([native_matrix(mlp.gate_up) for mlp in experts])
    down = _alike([native_matrix(mlp.down) for mlp in experts])
    return None if gate_up is None or down is None else (gate_up, down)


def native_matrix(linear: Linear) -> Struct | None:
    """Return None for a matrix that is not native or needs its columns reordered."""
    if isinstance(linear, NativeLinear) and linear.column_order is None:
        return linear.matrix
    return None


def _alike(matrices: Sequence[Struct | None]) -> Matrices | None:
    """Return the matrices as an array, or None if one is missing or differs from the others."""
    native = [matrix for matrix in matrices if matrix is not None]
    formats = {tuple(getattr(matrix, name) for name in FORMAT_FIELDS) for matrix in native}
    if len(native) < len(matrices) or len(formats) > 1:
        return None
    return (PackedMatrix * len(native))(*native)
