"""Native kernels for bfloat16 on the CPU: the loaded library, `Ops` and paged attention.

Tensors are passed as addresses. The caller checks their shapes and keeps them alive during the
call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass
from engine.runner.huge_pages import huge_page_memory
from engine.runner.layout import Ints, PassLayout
from engine.runner.model.ops import Angles, Linear, Peaks
from engine.runner.weights.quantize import Quantized

_INT, _THREADS, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_void_p
_CACHE = (_POINTER, *(_INT,) * 5)  # blocks; layers, KV heads, block size, head dim; layer
_SIGNATURES: dict[str, tuple[type | None, ...]] = {
    "baton_pack": (_POINTER, _POINTER, _INT, _INT, _THREADS),
    "baton_unpack_rows": (_POINTER, _POINTER, _INT, _POINTER, _INT),
    "baton_linear": (*(_POINTER,) * 4, _INT, _INT, _INT, _THREADS),
    "baton_pack_quantized": (*(_POINTER,) * 4, *(_INT,) * 4, _THREADS),
    "baton_unpack_quantized": (_POINTER, _POINTER, _INT, _POINTER, *(_INT,) * 4),
    "baton_quantized_linear": (*(_POINTER,) * 4, *(_INT,) * 5, _THREADS),
    "baton_norm": (*(_POINTER,) * 3, _INT, _INT, _FLOAT, _THREADS),
    "baton_rotate": (
        *(_POINTER, _INT, *(_POINTER,) * 4),
        *(_INT, _INT, _INT, _FLOAT, _THREADS),
    ),
    "baton_gate": (_POINTER, _POINTER, _INT, _INT, _THREADS),
    "baton_peaks": (_POINTER, _INT, _INT, _POINTER, _POINTER, _THREADS),
    "baton_layer": (_POINTER, _POINTER, _POINTER),
    "baton_layer_write": (_POINTER, _POINTER, _POINTER),
    "baton_write_kv": (
        *(*_CACHE, _POINTER, _INT, _POINTER, _INT),
        *(_POINTER, _POINTER, _INT, _THREADS),
    ),
    "baton_attend_chunk": (
        *_CACHE,
        *(_POINTER, _POINTER, _POINTER),
        *(_INT, _INT, _INT, _INT, _FLOAT, _THREADS),
    ),
    "baton_attend_singles": (
        *_CACHE,
        *(_POINTER, _POINTER, _POINTER, _INT, _POINTER),
        *(_INT, _INT, _INT, _FLOAT, _THREADS),
    ),
}


class Kernels:
    """Loaded kernel library. Results are bit-identical for any number of threads."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self.num_threads = num_threads
        self._library.baton_packed_bytes.restype = _INT
        self._library.baton_packed_bytes.argtypes = (_INT, _INT)
        self._library.baton_quantized_bytes.restype = _INT
        self._library.baton_quantized_bytes.argtypes = (_INT,) * 4
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = None, arguments
        self.pack = self._library.baton_pack
        self.unpack_rows = self._library.baton_unpack_rows
        self.linear = self._library.baton_linear
        self.pack_quantized = self._library.baton_pack_quantized
        self.unpack_quantized = self._library.baton_unpack_quantized
        self.quantized_linear = self._library.baton_quantized_linear
        self.norm = self._library.baton_norm
        self.rotate = self._library.baton_rotate
        self.gate = self._library.baton_gate
        self.peaks = self._library.baton_peaks
        self.layer = self._library.baton_layer
        self.layer_write = self._library.baton_layer_write
        self.write_kv = self._library.baton_write_kv
        self.attend_singles = self._library.baton_attend_singles
        self.attend_chunk = self._library.baton_attend_chunk

    def packed(self, weight: Tensor) -> Tensor:
        """Return a copy of the weight in packed layout, on huge pages where available."""
        packed = _allocate(self._library.baton_packed_bytes(*weight.shape))
        weight = weight.contiguous()
        self.pack(weight.data_ptr(), packed.data_ptr(), *weight.shape, self.num_threads)
        return packed

    def pack_quantized_weight(self, weight: Quantized) -> Tensor:
        """Return a copy of the quantized weight and its scales in packed layout, on huge pages."""
        layout = (weight.bits, *weight.numbers.shape, weight.group)
        packed = _allocate(self._library.baton_quantized_bytes(*layout))
        tensors = [each.contiguous() for each in (weight.numbers, weight.scales, weight.zeros)]
        addresses = [each.data_ptr() for each in (*tensors, packed)]
        self.pack_quantized(*addresses, *layout, self.num_threads)
        return packed


def _allocate(num_bytes: int) -> Tensor:
    """Return `num_bytes` of zeroed memory on huge pages."""
    return torch.frombuffer(huge_page_memory(num_bytes), dtype=torch.uint8)


class NativeOps:
    """Implements `Ops`."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        if isinstance(weight, Quantized):
            packed = self._kernels.pack_quantized_weight(weight)
            num_rows, num_columns = weight.numbers.shape
            layout = (weight.bits, num_rows, num_columns, weight.group)
            return NativeQuantizedLinear(self._kernels, packed, bias, layout, weight.order)
        num_rows, num_columns = weight.shape
        if num_columns % 2:
            raise ValueError(f"a matrix of {num_columns} columns: the kernels need an even number")
        return NativeLinear(
            self._kernels, self._kernels.packed(weight), bias, num_rows, num_columns
        )

    def normed(self, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        hidden_states = hidden_states.contiguous()
        output = torch.empty_like(hidden_states)
        self._kernels.norm(
            hidden_states.data_ptr(),
            weight.data_ptr(),
            output.data_ptr(),
            *hidden_states.shape,
            epsilon,
            self._kernels.num_threads,
        )
        return output

    def rotated(self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles) -> Tensor:
        if heads.stride()[1:] != (heads.shape[2], 1):
            heads = heads.contiguous()
        cosines, sines = (angle.contiguous() for angle in angles)
        output = torch.empty(heads.shape, dtype=heads.dtype)
        self._kernels.rotate(
            heads.data_ptr(),
            heads.stride(0),
            None if norm is None else norm.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            output.data_ptr(),
            *heads.shape,
            epsilon,
            self._kernels.num_threads,
        )
        return output

    def gated(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        num_tokens, both = gate_up.shape
        output = torch.empty(num_tokens, both // 2, dtype=gate_up.dtype)
        self._kernels.gate(
            gate_up.data_ptr(),
            output.data_ptr(),
            *output.shape,
            self._kernels.num_threads,
        )
        return output

    def peaks(self, logits: Tensor) -> Peaks:
        logits = logits.contiguous()
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        are_finite = torch.empty(len(logits), dtype=torch.bool)
        self._kernels.peaks(
            logits.data_ptr(),
            *logits.shape,
            token_ids.data_ptr(),
            are_finite.data_ptr(),
            self._kernels.num_threads,
        )
        return Peaks(token_ids, are_finite)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Implements `Linear` with packed bf16 weights."""

    kernels: Kernels
    packed: Tensor
    bias: Tensor | None
    num_rows: int
    num_columns: int

    def __call__(self, hidden_states: Tensor) -> Tensor:
        hidden_states = hidden_states.contiguous()
        output = torch.empty(len(hidden_states), self.num_rows, dtype=hidden_states.dtype)
        self.kernels.linear(
            hidden_states.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            len(hidden_states),
            self.num_rows,
            self.num_columns,
            self.kernels.num_threads,
        )
        return output

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        output = torch.empty(len(row_ids), self.num_columns, dtype=torch.bfloat16)
        self.kernels.unpack_rows(
            self.packed.data_ptr(),
            row_ids.data_ptr(),
            len(row_ids),
            output.data_ptr(),
            self.num_columns,
        )
        return output


@dataclass(frozen=True, slots=True)
class NativeQuantizedLinear:
    """Implements `Linear` with packed weights of 4 or 8 bits."""

    kernels: Kernels
    packed: Tensor
    bias: Tensor | None
    form: tuple[int, int, int, int]  # bits, rows, columns, group size
    order: Tensor | None  # of the activations' columns

    def __call__(self, hidden_states: Tensor) -> Tensor:
        hidden_states = (
            hidden_states.contiguous() if self.order is None else hidden_states[:, self.order]
        )
        output = torch.empty(len(hidden_states), self.form[1], dtype=hidden_states.dtype)
        self.kernels.quantized_linear(
            hidden_states.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            output.data_ptr(),
            len(hidden_states),
            *self.form,
            self.kernels.num_threads,
        )
        return output

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        output = torch.empty(len(row_ids), self.form[2], dtype=torch.bfloat16)
        self.kernels.unpack_quantized(
            self.packed.data_ptr(),
            row_ids.data_ptr(),
            len(row_ids),
            output.data_ptr(),
            *self.form,
        )
        return output


class NativePagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(self, kernels: Kernels, kv: Tensor, windows: Sequence[int | None]) -> None:
        self._kernels = kernels
        self._kv = kv
        self._windows = tuple(windows)

    def begin(self, layout: PassLayout) -> AttentionPass:
        return NativePass(self._kernels, self._kv, self._windows, layout)


class NativePass:
    """Implements `AttentionPass`."""

    def __init__(
        self,
        kernels: Kernels,
        kv: Tensor,
        windows: tuple[int | None, ...],
        layout: PassLayout,
    ) -> None:
        self._kernels = kernels
        self._windows = windows
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv.shape
        self._cache = (kv.data_ptr(), num_layers, num_kv_heads, block_size, head_dim)
        self._num_single = layout.num_single
        self._write_blocks = np.ascontiguousarray(layout.write_blocks)
        self._write_offsets = np.ascontiguousarray(layout.write_offsets)
        self._tables: Ints = np.ascontiguousarray(layout.block_tables)
        self._lens: Ints = np.ascontiguousarray(layout.context_lens)
        self._chunks = range(self._num_single, len(layout.num_queries))
        self._starts = np.ascontiguousarray(layout.query_starts)
        self._num_queries = np.ascontiguousarray(layout.num_queries)

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the kernels' `Pass` struct; addresses are valid while this object lives."""
        names = ("blocks", "num_layers", "num_kv_heads", "block_size", "head_dim")
        return dict(zip(names, self._cache, strict=True)) | {
            "write_blocks": self._write_blocks.ctypes.data,
            "write_offsets": self._write_offsets.ctypes.data,
            "tables": self._tables.ctypes.data,
            "lengths": self._lens.ctypes.data,
            "starts": self._starts.ctypes.data,
            "num_queries": self._num_queries.ctypes.data,
            "table_stride": self._tables.shape[1],
            "num_sequences": len(self._lens),
            "num_single": self._num_single,
        }

    def attend(self, layer: int, query: Tensor) -> Tensor:
        query = query.contiguous()
        output = torch.empty_like(query)
        if self._num_single:
            self._attend_singles(layer, query, output)
        for row in self._chunks:
            self._attend_chunk(layer, row, query, output)
        return output

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        inner = (key.shape[2], 1)
        key = key if key.stride()[1:] == inner else key.contiguous()
        value = value if value.stride()[1:] == inner else value.contiguous()
        self._kernels.write_kv(
            *self._cache,
            layer,
            key.data_ptr(),
            key.stride(0),
            value.data_ptr(),
            value.stride(0),
            self._write_blocks.ctypes.data,
            self._write_offsets.ctypes.data,
            len(key),
            self._kernels.num_threads,
        )

    def _attend_singles(self, layer: int, query: Tensor, output: Tensor) -> None:
        num_heads, head_dim = query.shape[1:]
        self._kernels.attend_singles(
            *self._cache,
            layer,
            query.data_ptr(),
            output.data_ptr(),
            self._tables.ctypes.data,
            self._tables.shape[1],
            self._lens.ctypes.data,
            self._windows[layer] or 0,
            self._num_single,
            num_heads // self._cache[2],
            1 / math.sqrt(head_dim),
            self._kernels.num_threads,
        )

    def _attend_chunk(self, layer: int, row: int, query: Tensor, output: Tensor) -> None:
        num_heads, head_dim = query.shape[1:]
        first = int(self._starts[row])
        self._kernels.attend_chunk(
            *self._cache,
            layer,
            query[first].data_ptr(),
            output[first].data_ptr(),
            self._tables[row].ctypes.data,
            int(self._num_queries[row]),
            int(self._lens[row]),
            self._windows[layer] or 0,
            num_heads // self._cache[2],
            1 / math.sqrt(head_dim),
            self._kernels.num_threads,
        )
