"""The functions of the kernels' library, and the ops and attention made of them.

All of it is for bfloat16 on the CPU. Tensors go in as addresses: whoever calls sees to their
shapes, and keeps them alive for as long as the call takes.
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

from engine.runner.attention import AttentionPass
from engine.runner.layout import Ints, PassLayout
from engine.runner.memory import huge_page_memory
from engine.runner.ops import Angles, Linear, Peaks
from engine.runner.quantize import Quantized

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
    """The loaded library. Answers are bit for bit the same for any number of threads."""

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
        """A copy of the weight in the order in which it is read, on huge pages where there are."""
        packed = _huge_pages(self._library.baton_packed_bytes(*weight.shape))
        weight = weight.contiguous()
        self.pack(weight.data_ptr(), packed.data_ptr(), *weight.shape, self.num_threads)
        return packed

    def packed_numbers(self, weight: Quantized) -> Tensor:
        """The same of whole numbers, with their scales."""
        form = (weight.bits, *weight.numbers.shape, weight.group)
        packed = _huge_pages(self._library.baton_quantized_bytes(*form))
        tensors = [each.contiguous() for each in (weight.numbers, weight.scales, weight.zeros)]
        addresses = [each.data_ptr() for each in (*tensors, packed)]
        self.pack_quantized(*addresses, *form, self.num_threads)
        return packed


def _huge_pages(num_bytes: int) -> Tensor:
    return torch.frombuffer(huge_page_memory(num_bytes), dtype=torch.uint8)


class NativeOps:
    """Keeps to Ops."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def linear(self, weight: Tensor | Quantized, bias: Tensor | None) -> Linear:
        if isinstance(weight, Quantized):
            packed = self._kernels.packed_numbers(weight)
            num_rows, num_columns = weight.numbers.shape
            form = (weight.bits, num_rows, num_columns, weight.group)
            return NativeQuantizedLinear(self._kernels, packed, bias, form, weight.order)
        num_rows, num_columns = weight.shape
        if num_columns % 2:
            raise ValueError(f"a matrix of {num_columns} columns: the kernels take them in pairs")
        return NativeLinear(
            self._kernels, self._kernels.packed(weight), bias, num_rows, num_columns
        )

    def normed(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        states = states.contiguous()
        target = torch.empty_like(states)
        self._kernels.norm(
            states.data_ptr(),
            weight.data_ptr(),
            target.data_ptr(),
            *states.shape,
            epsilon,
            self._kernels.num_threads,
        )
        return target

    def rotated(self, heads: Tensor, norm: Tensor | None, epsilon: float, angles: Angles) -> Tensor:
        if heads.stride()[1:] != (heads.shape[2], 1):
            heads = heads.contiguous()
        cosines, sines = (angle.contiguous() for angle in angles)
        target = torch.empty(heads.shape, dtype=heads.dtype)
        self._kernels.rotate(
            heads.data_ptr(),
            heads.stride(0),
            None if norm is None else norm.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            target.data_ptr(),
            *heads.shape,
            epsilon,
            self._kernels.num_threads,
        )
        return target

    def gated(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        num_tokens, both = gate_up.shape
        target = torch.empty(num_tokens, both // 2, dtype=gate_up.dtype)
        self._kernels.gate(
            gate_up.data_ptr(),
            target.data_ptr(),
            *target.shape,
            self._kernels.num_threads,
        )
        return target

    def peaks(self, logits: Tensor) -> Peaks:
        logits = logits.contiguous()
        places = torch.empty(len(logits), dtype=torch.int64)
        are_finite = torch.empty(len(logits), dtype=torch.bool)
        self._kernels.peaks(
            logits.data_ptr(),
            *logits.shape,
            places.data_ptr(),
            are_finite.data_ptr(),
            self._kernels.num_threads,
        )
        return Peaks(places, are_finite)


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """Keeps to Linear."""

    kernels: Kernels
    packed: Tensor
    bias: Tensor | None
    num_rows: int
    num_columns: int

    def __call__(self, states: Tensor) -> Tensor:
        states = states.contiguous()
        answer = torch.empty(len(states), self.num_rows, dtype=states.dtype)
        self.kernels.linear(
            states.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            answer.data_ptr(),
            len(states),
            self.num_rows,
            self.num_columns,
            self.kernels.num_threads,
        )
        return answer

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        target = torch.empty(len(row_ids), self.num_columns, dtype=torch.bfloat16)
        self.kernels.unpack_rows(
            self.packed.data_ptr(),
            row_ids.data_ptr(),
            len(row_ids),
            target.data_ptr(),
            self.num_columns,
        )
        return target


@dataclass(frozen=True, slots=True)
class NativeQuantizedLinear:
    """Keeps to Linear."""

    kernels: Kernels
    packed: Tensor
    bias: Tensor | None
    form: tuple[int, int, int, int]  # bits, rows, columns, columns of a group
    order: Tensor | None

    def __call__(self, states: Tensor) -> Tensor:
        states = states.contiguous() if self.order is None else states[:, self.order]
        answer = torch.empty(len(states), self.form[1], dtype=states.dtype)
        self.kernels.quantized_linear(
            states.data_ptr(),
            self.packed.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            answer.data_ptr(),
            len(states),
            *self.form,
            self.kernels.num_threads,
        )
        return answer

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        target = torch.empty(len(row_ids), self.form[2], dtype=torch.bfloat16)
        self.kernels.unpack_quantized(
            self.packed.data_ptr(),
            row_ids.data_ptr(),
            len(row_ids),
            target.data_ptr(),
            *self.form,
        )
        return target


class NativePagedAttention:
    """Keeps to PagedAttention. An answer's bits depend on its own sequence up to itself alone."""

    def __init__(self, kernels: Kernels, kv: Tensor, windows: Sequence[int | None]) -> None:
        self._kernels = kernels
        self._kv = kv
        self._windows = tuple(windows)

    def begin(self, layout: PassLayout) -> AttentionPass:
        return NativePass(self._kernels, self._kv, self._windows, layout)


class NativePass:
    """Keeps to AttentionPass."""

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
        """What `baton_layer` must know of it; the addresses hold while this object does."""
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
        answer = torch.empty_like(query)
        if self._num_single:
            self._attend_singles(layer, query, answer)
        for row in self._chunks:
            self._attend_chunk(layer, row, query, answer)
        return answer

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

    def _attend_singles(self, layer: int, query: Tensor, answer: Tensor) -> None:
        num_heads, head_dim = query.shape[1:]
        self._kernels.attend_singles(
            *self._cache,
            layer,
            query.data_ptr(),
            answer.data_ptr(),
            self._tables.ctypes.data,
            self._tables.shape[1],
            self._lens.ctypes.data,
            self._windows[layer] or 0,
            self._num_single,
            num_heads // self._cache[2],
            1 / math.sqrt(head_dim),
            self._kernels.num_threads,
        )

    def _attend_chunk(self, layer: int, row: int, query: Tensor, answer: Tensor) -> None:
        num_heads, head_dim = query.shape[1:]
        first = int(self._starts[row])
        self._kernels.attend_chunk(
            *self._cache,
            layer,
            query[first].data_ptr(),
            answer[first].data_ptr(),
            self._tables[row].ctypes.data,
            int(self._num_queries[row]),
            int(self._lens[row]),
            self._windows[layer] or 0,
            num_heads // self._cache[2],
            1 / math.sqrt(head_dim),
            self._kernels.num_threads,
        )
