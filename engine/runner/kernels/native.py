"""Native kernels for bfloat16 on the CPU: the loaded library, `Ops` and paged attention.

Tensors are passed as addresses. The caller checks their shapes and keeps them alive during the
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass, LayerAttention
from engine.runner.huge_pages import huge_page_memory
from engine.runner.kernels.abi import (
    ArgmaxArgs,
    AttentionArgs,
    BatchLayout,
    LinearArgs,
    PackArgs,
    PackedMatrix,
    PagedKv,
    RmsNormArgs,
    RopeArgs,
    WriteKvArgs,
    load_library,
)
from engine.runner.layout import PassLayout
from engine.runner.model.config import Activation
from engine.runner.model.experts import Moe, Router, Routing, mix_experts, route
from engine.runner.model.ops import Gate, Norm, Peaks, TorchOps
from engine.runner.model.rope import Angles
from engine.runner.weights.quantize import Quantized


class Kernels:
    """Loaded kernel library. Results are bit-identical for any number of threads."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.path = path
        self.library = load_library(path)
        self.num_threads = num_threads


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeOps:
    """Implements `Ops`."""

    copies_weights = True

    def __init__(self, kernels: Kernels) -> None:
        self._library = kernels.library
        self._num_threads = kernels.num_threads
        self._kernels = kernels
        self._torch = TorchOps()

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> NativeLinear:
        """Pack a copy of the weight, on huge pages where available."""
        if isinstance(weight, Quantized):
            tensors: tuple[Tensor, ...] = weight.numbers, weight.scales, weight.zeros
            bits, group_size, column_order = weight.bits, weight.group, weight.order
            is_mxfp4 = weight.is_mxfp4
        else:
            tensors = (weight,)
            bits, group_size, column_order, is_mxfp4 = 16, 0, None, False
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        num_rows, num_columns = tensors[0].shape
        if bits == 16 and num_columns % 2:
            raise ValueError(f"a matrix of {num_columns} columns: the kernels need an even number")
        matrix = PackedMatrix(
            None, address(bias), bits, num_rows, num_columns, group_size, is_mxfp4
        )
        memory = huge_page_memory(self._library.baton_packed_bytes(matrix))
        packed = torch.frombuffer(memory, dtype=torch.uint8)
        matrix.packed = packed.data_ptr()
        addresses = dict(zip(("weights", "scales", "zeros"), map(address, tensors), strict=False))
        self._library.baton_pack(
            PackArgs(matrix=matrix, **addresses, num_threads=self._num_threads)
        )
        return NativeLinear(self._kernels, matrix, (packed, bias), column_order)

    def rms_norm(self, hidden_states: Tensor, norm: Norm) -> Tensor:
        if norm.rounds_once:
            return self._torch.rms_norm(hidden_states, norm)
        hidden_states = hidden_states.contiguous()
        output = torch.empty_like(hidden_states)
        num_rows, size = hidden_states.shape
        self._library.baton_rms_norm(
            RmsNormArgs(
                src=hidden_states.data_ptr(),
                weight=norm.weight.data_ptr(),
                dst=output.data_ptr(),
                num_rows=num_rows,
                size=size,
                epsilon=norm.epsilon,
                num_threads=self._num_threads,
            )
        )
        return output

    def apply_rope(self, heads: Tensor, norm: Norm | None, angles: Angles) -> Tensor:
        if norm is not None and norm.rounds_once:
            heads, norm = self._torch.rms_norm(heads, norm), None
        num_tokens, num_heads, head_dim = heads.shape
        if heads.stride()[1:] != (head_dim, 1):
            heads = heads.contiguous()
        cosines, sines = (angle.contiguous() for angle in angles)
        output = torch.empty(heads.shape, dtype=heads.dtype)
        self._library.baton_rope(
            RopeArgs(
                src=heads.data_ptr(),
                norm_weight=None if norm is None else norm.weight.data_ptr(),
                cosines=cosines.data_ptr(),
                sines=sines.data_ptr(),
                dst=output.data_ptr(),
                src_stride=heads.stride(0),
                num_tokens=num_tokens,
                num_heads=num_heads,
                head_dim=head_dim,
                epsilon=0.0 if norm is None else norm.epsilon,
                num_threads=self._num_threads,
            )
        )
        return output

    def apply_gate(self, gate_up: Tensor, gate: Gate) -> Tensor:
        if gate.activation is not Activation.SILU:
            return self._torch.apply_gate(gate_up, gate)
        gate_up = gate_up.contiguous()
        num_tokens, both = gate_up.shape
        output = torch.empty(num_tokens, both // 2, dtype=gate_up.dtype)
        self._library.baton_swiglu(
            gate_up.data_ptr(), output.data_ptr(), *output.shape, self._num_threads
        )
        return output

    def add(self, hidden_states: Tensor, output: Tensor, scale: float) -> Tensor:
        return self._torch.add(hidden_states, output, scale)

    def route(self, hidden_states: Tensor, router: Router) -> Routing:
        return route(hidden_states, router)

    def mix_experts(self, moe: Moe, gate: Gate, hidden_states: Tensor, routing: Routing) -> Tensor:
        return mix_experts(self, moe, gate, hidden_states, routing)

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


class NativePagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(self, kernels: Kernels, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._kernels = kernels
        self._kv = kv
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        self._paged_kv = PagedKv(kv.data_ptr(), num_layers, num_kv_heads, block_size, head_dim)
        self._layers = tuple(layers)

    def begin(self, layout: PassLayout) -> AttentionPass:
        return NativePass(self._kernels, self._paged_kv, self._layers, layout)


class NativePass:
    """Implements `AttentionPass`."""

    def __init__(
        self,
        kernels: Kernels,
        kv: PagedKv,
        layers: tuple[LayerAttention, ...],
        layout: PassLayout,
    ) -> None:
        self._kernels = kernels
        self._layers = layers
        arrays = {
            "write_blocks": layout.write_blocks,
            "write_offsets": layout.write_offsets,
            "block_tables": layout.block_tables,
            "context_lens": layout.context_lens,
            "query_starts": layout.query_starts,
            "num_queries": layout.num_queries,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._arrays = arrays  # own the memory that `batch` points to
        self.kv = kv
        self.batch = BatchLayout(
            **{name: array.ctypes.data for name, array in arrays.items()},
            table_stride=layout.block_tables.shape[1],
            num_sequences=len(layout.context_lens),
            num_single=layout.num_single,
            num_tokens=len(layout.write_blocks),
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        query = query.contiguous()
        output = torch.empty_like(query)
        num_heads = query.shape[1]
        self._kernels.library.baton_attention(
            AttentionArgs(
                kv=self.kv,
                batch=self.batch,
                queries=query.data_ptr(),
                dst=output.data_ptr(),
                layer=layer,
                num_heads=num_heads,
                window=self._layers[layer].window or 0,
                scale=self._layers[layer].scale,
                num_threads=self._kernels.num_threads,
            )
        )
        return output

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        inner = (key.shape[2], 1)
        key = key if key.stride()[1:] == inner else key.contiguous()
        value = value if value.stride()[1:] == inner else value.contiguous()
        self._kernels.library.baton_write_kv(
            WriteKvArgs(
                kv=self.kv,
                batch=self.batch,
                keys=key.data_ptr(),
                values=value.data_ptr(),
                layer=layer,
                key_stride=key.stride(0),
                value_stride=value.stride(0),
                num_threads=self._kernels.num_threads,
            )
        )
