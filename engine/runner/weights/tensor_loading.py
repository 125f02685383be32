"""Loads tensors and linear layers by name; each tensor is read once, and quantized if asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Shape, Tensors
from baton.checkpoint.quantized import Quantized, have_same_order, in_one_format, stacked
from baton.core.errors import ModelError
from baton.engine.runner.device.host_memory import HeapTrimmer
from baton.engine.runner.model.config import ModelConfig, NormConfig, RowScale
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import HeadLinears, Linear, Moe, SplitLinear
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.model.quantization import Quantization
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.model_info import LoadProgress, LoadProgressCallback
from baton.engine.runner.weights.loader import NO_NORM, Stack, StackedExpert, WeightLoader
from baton.engine.runner.weights.packed import (
    MARKERS,
    dequantize_float8,
    is_packed,
    read_mxfp4,
    read_packed,
)
from baton.engine.runner.weights.packed_weight import Packer
from baton.engine.runner.weights.quantize import (
    Quantize,
    select_rows,
    to_int4,
    to_int6,
    to_int8,
)
from baton.engine.runner.weights.weight_cache import CachedWeights

QUANTIZERS: Mapping[str, Quantize | None] = {"none": None, "int8": to_int8, "int4": to_int4}
# Of matrices whose errors raise the perplexity most, for their size.
SENSITIVE_QUANTIZERS = {**QUANTIZERS, "int4": to_int6}


class WeightParts(Protocol):
    """Parts of a model that hold its weights."""

    @property
    def ops(self) -> Ops: ...

    @property
    def packer(self) -> Packer | None:
        """Return what packs matrices; None: they are used as they are loaded."""
        ...

    @property
    def make_layers(self) -> Callable[[ModelConfig, Sequence[Layer]], Sequence[DecoderLayer]]: ...

    @property
    def waits_for_experts(self) -> Callable[[Moe], bool]: ...


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Dtype, device, implementation and quantization of the loaded weights."""

    dtype: torch.dtype
    device: torch.device
    parts: WeightParts
    quantize: str = "none"
    cached: CachedWeights | None = None  # packed matrices, if the parts pack them
    importance: Mapping[str, Tensor] = field(default_factory=dict)  # of columns, by matrix
    group: RankGroup | None = None  # of the ranks that share the model
    vocab_size: int = 0  # of all ranks together, with a group


@dataclass(frozen=True, slots=True)
class MappedRows:
    """Implements `Linear` by the rows of a mapped file: no others are ever read."""

    table: Tensor

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return hidden_states @ self.table.T

    def rows(self, row_ids: Tensor) -> Tensor:
        return self.table[row_ids]


class TensorLoader(WeightLoader):
    """Loads tensors of files; matrices of one fused linear layer are stacked."""

    def __init__(
        self,
        files: Tensors,
        target: LoadTarget,
        *,
        norm: NormConfig = NO_NORM,
        quantization: Quantization | None = None,
        row_scales: Mapping[str, Sequence[RowScale]] = {},
        on_progress: LoadProgressCallback | None = None,
        num_expected: int = 0,
    ) -> None:
        """`num_expected` numbers are loaded in all.

        Matrices in the formats of GGUF must have no row scales.
        """
        super().__init__(norm, target.dtype, target.device)
        self._how = quantization
        self._row_scales = row_scales
        self._files = files
        self._names = frozenset(files.names())
        self._target = target
        self._trimmer = HeapTrimmer()
        is_read = target.cached is not None and target.cached.is_found  # with its own progress
        self._on_progress = None if is_read else on_progress
        self._num_linears = 0
        self._num_loaded = 0  # numbers
        self._num_expected = num_expected

    def vector(self, name: str, *shape: int) -> Tensor:
        vector = torch.empty(shape)
        self._copy(name, vector)
        return vector.to(self._device)

    def matrix(self, stack: Stack, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self._dtype
        how = self._integer_format(stack.names[0])
        if how is not None:
            [name], [shape] = stack.names, stack.shapes()
            return replace(self._load_unpacked(name, shape, how), dtype=dtype).dequantize()
        return self._stacked(stack, dtype)

    def embedding(self, stack: Stack) -> Linear:
        return self.linear(replace(stack, is_sensitive=True))

    def rows(self, stack: Stack) -> Linear:
        [name] = stack.names
        if self._files.quantized(f"{name}.weight") is None and self._target.quantize == "none":
            mapped = self._mapped(stack, None)
            if mapped is not None:
                return MappedRows(mapped)
        return self.embedding(stack)

    def linear(self, stack: Stack) -> Linear:
        if stack.stacked is not None:
            [name] = stack.names
            return self._expert_linear(name, stack, stack.stacked)
        quantize, order = self._quantizer(stack), stack.order
        name, bias = "+".join(stack.names), None
        if stack.has_bias:
            sizes = [shape[:1] for shape in stack.shapes()]
            bias = self._joined([f"{each}.bias" for each in stack.names], sizes, self._dtype)
        if order is None:
            return self._make_linear(name, lambda: self._matrix(stack, quantize), bias)
        rows = torch.arange(stack.num_rows)
        rows[: len(order)] = torch.tensor(order)

        def load() -> Tensor | Quantized:
            return select_rows(self._matrix(stack, quantize), rows.to(self._device))

        return self._make_linear(name, load, None if bias is None else bias[rows])

    def split_linear(self, first: Stack, second: Stack) -> tuple[Linear, Linear]:
        matrix = functools.cache(lambda: self._matrix(first, None))
        quantize, [name] = self._quantizer(first), first.names

        def load(part: Stack) -> Tensor | Quantized:
            return select_rows(matrix(), torch.tensor(part.order, device=self._device))

        def load_first() -> Tensor | Quantized:
            rows = load(first)
            return rows if quantize is None or isinstance(rows, Quantized) else quantize(rows)

        return (
            self._make_linear(name, load_first, None),
            self._make_linear(name, lambda: load(second), None),
        )

    def linear_of(self, weight: Tensor, bias: Tensor | None) -> Linear:
        bias = None if bias is None else bias.to(self._dtype)
        return self._target.parts.ops.linear(weight.to(self._dtype).contiguous(), bias)

    def split_columns(self, first: Linear, second: Linear, num_columns: int) -> Linear:
        return SplitLinear(first, second, num_columns, self._target.parts.ops.add)

    def skip(self, name: str, *shape: int) -> None:
        pass

    def head_linears(self, weights: Tensor) -> HeadLinears:
        self._trimmer.count(weights.nbytes)
        return self._target.parts.ops.head_linears(weights)

    def _expert_linear(self, name: str, stack: Stack, stacked: StackedExpert) -> Linear:
        bias = None
        if stack.has_bias:
            part = self._files.part(f"{name}_bias", stacked.number)
            bias = self._place(_join_halves(part) if stacked.form.is_interleaved else part)
            self._count(bias.numel())
        return self._make_linear(
            f"{name}.{stacked.number}", lambda: self._expert_matrix(name, stack, stacked), bias
        )

    def _quantizer(self, stack: Stack) -> Quantize | None:
        """Return the quantization at load of these matrices."""
        if stack.keeps_dtype:
            return None
        if stack.is_sensitive:
            return SENSITIVE_QUANTIZERS[self._target.quantize]
        # That of the first one: all have the same inputs.
        importance = self._target.importance.get(stack.names[0])
        if importance is None:
            return QUANTIZERS[self._target.quantize]
        return functools.partial(to_int4, importance=importance)

    def _make_linear(
        self, name: str, load: Callable[[], Tensor | Quantized], bias: Tensor | None
    ) -> Linear:
        """Make a linear layer of a cached matrix, or of the one that `load` returns."""
        packer, cached = self._target.parts.packer, self._target.cached
        if packer is None or cached is None:
            return self._target.parts.ops.linear(self._trimmed(load()), bias)
        name = f"{self._num_linears} {name}"
        self._num_linears += 1
        packed = cached.find(name)
        if packed is None:
            packed = packer.pack(self._trimmed(load()))
            cached.add(name, packed)
        return packer.packed_linear(packed, bias)

    def _trimmed(self, matrix: Tensor | Quantized) -> Tensor | Quantized:
        size = matrix.numbers.numel() if isinstance(matrix, Quantized) else matrix.nbytes
        self._trimmer.count(size)
        return matrix

    def _expert_matrix(self, name: str, stack: Stack, stacked: StackedExpert) -> Tensor | Quantized:
        form, number, _ = stacked
        self._count(stack.num_rows * stack.columns)
        if self._is_packed(name):
            parts = (self._files.part(f"{name}_{part}", number) for part in ("blocks", "scales"))
            blocks, scales = (_join_halves(part) if form.is_interleaved else part for part in parts)
            return read_mxfp4(blocks, scales, self._dtype).on(self._device)
        stored = stacked.weight(name)
        quantized = self._files.quantized(stored, number)
        if quantized is not None and not (form.is_transposed or form.is_interleaved):
            return self._join(quantized)
        part = self._files.part(stored, number)
        matrix = part.T if form.is_transposed else part
        matrix = _join_halves(matrix) if form.is_interleaved else matrix
        quantizers = SENSITIVE_QUANTIZERS if stack.is_sensitive else QUANTIZERS
        quantize = quantizers[self._target.quantize]
        if not self._can_map(matrix, quantize):
            matrix = self._place(matrix)
        return matrix if quantize is None else quantize(matrix)

    def _can_map(self, tensor: Tensor, quantize: Quantize | None) -> bool:
        """Return whether a matrix of a mapped file can be used without a copy of it."""
        is_copied_later = quantize is not None or self._target.parts.ops.copies_weights
        is_placed = (tensor.dtype, tensor.device) == (self._dtype, self._device)
        return is_copied_later and is_placed

    def _place(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of a mapped file."""
        placed = torch.empty(tensor.shape, dtype=self._dtype, device=self._device)
        return placed.copy_(tensor)

    def _stacked(self, stack: Stack, dtype: torch.dtype) -> Tensor:
        names = [f"{name}.weight" for name in stack.names]
        return self._joined(names, stack.shapes(), dtype)

    def _joined(self, names: Sequence[str], shapes: Sequence[Shape], dtype: torch.dtype) -> Tensor:
        sizes = [shape[0] for shape in shapes]
        shape = (sum(sizes), *shapes[0][1:])
        whole = torch.empty(shape, dtype=dtype, device=self._device)
        for name, part in zip(names, whole.split(sizes), strict=True):
            self._copy(name, part)
        return whole

    def _copy(self, name: str, destination: Tensor) -> None:
        linear = name.removesuffix(".weight")
        if self._how is not None and self._how.is_float8 and self._is_packed(linear):
            scale = self._files.tensor(f"{linear}{MARKERS[self._how.packing]}")
            dequantize_float8(destination, self._files.tensor(name), scale, self._how)
        else:
            self._files.copy_into(name, destination)
        if linear in self._row_scales:
            destination.mul_(self._scales_of(linear))
        self._count(destination.numel())

    def _scales_of(self, linear: str) -> Tensor:
        """Return the scale of each row of a matrix, as a column."""
        scales = self._row_scales[linear]
        numbers = torch.tensor([each.scale for each in scales])
        counts = torch.tensor([each.num_rows for each in scales])
        return numbers.repeat_interleave(counts)[:, None].to(self._device)

    def _matrix(self, stack: Stack, quantize: Quantize | None) -> Tensor | Quantized:
        if any(map(self._integer_format, stack.names)):
            return self._load_packed(stack)
        stored = self._stored_quantized(stack.names)
        if stored is not None:
            return stored
        matrix = self._mapped(stack, quantize)
        if matrix is None:
            matrix = self._stacked(stack, self._dtype)
        return matrix if quantize is None else quantize(matrix)

    def _stored_quantized(self, names: Sequence[str]) -> Tensor | Quantized | None:
        """Return a matrix in the formats of its file, or None if a part of it is not quantized."""
        found = [self._files.quantized(f"{name}.weight") for name in names]
        parts = [part for parts in found for part in parts or ()]
        if not all(found):
            return None
        matrix = self._join(parts)
        self._count(matrix.numbers.numel() if isinstance(matrix, Quantized) else matrix.numel())
        return matrix

    def _join(self, parts: Sequence[Quantized]) -> Tensor | Quantized:
        """Join parts by row, in one format where their formats differ."""
        placed = [replace(part, dtype=self._dtype).on(self._device) for part in parts]
        if self._target.parts.ops.keeps_quantized:
            return stacked([part.with_half_scales() for part in in_one_format(placed)])
        return torch.cat([part.dequantize() for part in placed])

    def _mapped(self, stack: Stack, quantize: Quantize | None) -> Tensor | None:
        """Return a matrix without copying it, or None where it needs a copy."""
        name = stack.names[0]
        if len(stack.names) > 1 or self._is_packed(name) or name in self._row_scales:
            return None
        matrix = self._files.tensor(f"{name}.weight")
        if not self._can_map(matrix, quantize):
            return None
        self._count(matrix.numel())
        return matrix

    def _load_packed(self, stack: Stack) -> Quantized:
        names = stack.names
        formats = [self._integer_format(name) for name in names]
        known = [how for how in formats if how is not None]
        if len(known) < len(names):
            raise ModelError(f"{', '.join(names)}: some are quantized and some are not")
        parts = list(map(self._load_unpacked, names, stack.shapes(), known))
        if not have_same_order(parts):
            raise ModelError(f"{', '.join(names)}: their columns have different orders")
        return stacked(parts)

    def _load_unpacked(self, name: str, shape: Shape, how: Quantization) -> Quantized:
        unpacked = read_packed(name, shape, self._names, how, self._files.tensor, self._dtype)
        self._count(torch.Size(shape).numel())
        unpacked = unpacked.on(self._device)
        return unpacked.scaled(self._scales_of(name)) if name in self._row_scales else unpacked

    def _is_packed(self, name: str) -> bool:
        return self._how is not None and is_packed(name, self._names, self._how)

    def _integer_format(self, name: str) -> Quantization | None:
        """Return the format of a matrix of packed integers, None for any other."""
        is_float8 = self._how is not None and self._how.is_float8
        return self._how if self._is_packed(name) and not is_float8 else None

    def _count(self, num_numbers: int) -> None:
        """Report the progress, in bytes of the target's dtype."""
        self._num_loaded += num_numbers
        if self._on_progress is not None:
            size = self._dtype.itemsize
            self._on_progress(LoadProgress(self._num_loaded * size, self._num_expected * size))


def _join_halves(interleaved: Tensor) -> Tensor:
    """Return the rows with even index, then those with odd index."""
    return torch.cat((interleaved[::2], interleaved[1::2]))
