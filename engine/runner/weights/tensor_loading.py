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
from baton.engine.runner.families.family import ExpertNames
from baton.engine.runner.model.config import ModelConfig, NormConfig, RowScale
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import HeadLinears, Linear, Moe, SplitLinear
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.quantization import Quantization
from baton.engine.runner.model.rank_group import RankGroup
from baton.engine.runner.model_info import LoadProgress, LoadProgressCallback
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
NO_NORM = NormConfig(epsilon=0.0)  # of a model without RMS norms


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


class TensorLoader:
    """Loads tensors in the target's dtype; matrices of one fused linear layer are stacked."""

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        files: Tensors,
        target: LoadTarget,
        on_progress: LoadProgressCallback | None,
        *,
        norm: NormConfig = NO_NORM,
        quantization: Quantization | None = None,
        loaded_elsewhere: str | tuple[str, ...] = (),
        row_scales: Mapping[str, Sequence[RowScale]] = {},
    ) -> None:
        """`shapes` are those of all tensors as if no matrix was quantized.

        Names that end with `loaded_elsewhere` are not counted in the progress. Matrices in the
        formats of GGUF must have no row scales.
        """
        self._norm_config = norm
        self._how = quantization
        self._row_scales = row_scales
        self._shapes = shapes
        self._files = files
        self._names = frozenset(files.names())
        self._target = target
        self._trimmer = HeapTrimmer()
        is_read = target.cached is not None and target.cached.is_found  # with its own progress
        self._on_progress = None if is_read else on_progress
        self._num_linears = 0
        self._num_loaded = 0  # numbers
        self._num_expected = sum(
            torch.Size(shape).numel()
            for name, shape in self._shapes.items()
            if not name.endswith(loaded_elsewhere)
        )

    def vector(self, name: str) -> Tensor:
        """Load a small tensor in float32, dequantized if necessary."""
        linear = name.removesuffix(".weight")
        how = self._integer_format(linear)
        if how is not None:
            return replace(self._load_unpacked(linear, how), dtype=torch.float32).dequantize()
        vector = torch.empty(self._shapes[name])
        self._copy(name, vector)
        return vector.to(self._target.device)

    def gated_norm(self, name: str, epsilon: float | None) -> Norm:
        """Load the weight of a norm whose output is multiplied by a gate."""
        weight = self.vector(name).to(self._target.dtype)
        return Norm(weight, self._norm_config.epsilon if epsilon is None else epsilon)

    def norm(self, name: str, order: Sequence[int] | None = None) -> Norm:
        """Load a norm's weight. `order` permutes it."""
        config = self._norm_config
        weight = self.vector(f"{name}.weight") + config.weight_offset
        if order is not None:
            weight = weight[list(order)]
        if not config.rounds_once:
            weight = weight.to(self._target.dtype)
        return Norm(weight, config.epsilon, config.rounds_once, config.is_centered)

    def unweighted_norm(self, size: int) -> Norm:
        weight = torch.ones(size, device=self._target.device)
        return Norm(weight, self._norm_config.epsilon, rounds_once=True)

    def embedding(self, name: str) -> Linear:
        """Load the embedding or LM head."""
        quantize = SENSITIVE_QUANTIZERS[self._target.quantize]
        return self._make_linear(name, lambda: self._matrix([name], quantize), None)

    def rows(self, name: str) -> Linear:
        """Load a table of which rows alone are read: from the mapped file, if it is stored so."""
        if self._files.quantized(f"{name}.weight") is None and self._target.quantize == "none":
            mapped = self._mapped([name], None)
            if mapped is not None:
                return MappedRows(mapped)
        return self.embedding(name)

    def linear(
        self,
        names: Sequence[str],
        has_bias: bool,
        order: Sequence[int] | None = None,
        *,
        keeps_dtype: bool = False,
        is_sensitive: bool = False,
    ) -> Linear:
        """Load a linear layer whose matrices are stacked.

        `order` permutes its first rows. With `keeps_dtype` it is not quantized at load.
        """
        quantize = None if keeps_dtype else self._quantizer(names[0], is_sensitive=is_sensitive)
        bias = self._stacked([f"{name}.bias" for name in names]) if has_bias else None
        if order is None:
            return self._make_linear("+".join(names), lambda: self._matrix(names, quantize), bias)
        rows = torch.arange(sum(self._shapes[f"{name}.weight"][0] for name in names))
        rows[: len(order)] = torch.tensor(order)

        def load() -> Tensor | Quantized:
            return select_rows(self._matrix(names, quantize), rows.to(self._target.device))

        return self._make_linear("+".join(names), load, None if bias is None else bias[rows])

    def split_linear(
        self, name: str, rows: Sequence[int], plain_rows: Sequence[int]
    ) -> tuple[Linear, Linear]:
        """Load two parts of a matrix. The second one is not quantized at load."""
        matrix = functools.cache(lambda: self._matrix([name], None))
        quantize = self._quantizer(name)

        def load(part: Sequence[int]) -> Tensor | Quantized:
            return select_rows(matrix(), torch.tensor(part, device=self._target.device))

        def load_first() -> Tensor | Quantized:
            first = load(rows)
            return first if quantize is None or isinstance(first, Quantized) else quantize(first)

        return (
            self._make_linear(name, load_first, None),
            self._make_linear(name, lambda: load(plain_rows), None),
        )

    def plain_matrix(self, name: str) -> Tensor:
        """Load a matrix in the target's dtype, dequantized if necessary."""
        how = self._integer_format(name)
        if how is not None:
            return self._load_unpacked(name, how).dequantize()
        return self._stacked([f"{name}.weight"])

    def split_columns(self, first: Linear, second: Linear, num_columns: int) -> Linear:
        """Return the sum of two layers, the first of which has the first columns."""
        return SplitLinear(first, second, num_columns, self._target.parts.ops.add)

    def head_linears(self, weights: Tensor) -> HeadLinears:
        self._trimmer.count(weights.nbytes)
        return self._target.parts.ops.head_linears(weights)

    def expert_linear(
        self, name: str, expert: int, names: ExpertNames, has_bias: bool, *, is_gate_up: bool
    ) -> Linear:
        """Load one expert's matrix out of a tensor that stacks those of all experts."""
        is_interleaved = is_gate_up and names.is_interleaved
        bias = None
        if has_bias:
            part = self._files.part(f"{name}_bias", expert)
            bias = self._place(_join_halves(part) if is_interleaved else part)
            self._count(bias.numel())
        return self._make_linear(
            f"{name}.{expert}",
            lambda: self._expert_matrix(name, expert, names, is_gate_up=is_gate_up),
            bias,
        )

    def _quantizer(self, name: str, *, is_sensitive: bool = False) -> Quantize | None:
        """Return the quantization at load of matrices that have the same inputs as this one."""
        if is_sensitive:
            return SENSITIVE_QUANTIZERS[self._target.quantize]
        importance = self._target.importance.get(name)
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

    def _expert_matrix(
        self, name: str, expert: int, names: ExpertNames, *, is_gate_up: bool
    ) -> Tensor | Quantized:
        is_interleaved = is_gate_up and names.is_interleaved
        stored = f"{name}.weight" if names.has_weight_suffix else name
        self._count(torch.Size(self._shapes[stored][1:]).numel())
        if self._is_packed(name):
            parts = (self._files.part(f"{name}_{part}", expert) for part in ("blocks", "scales"))
            blocks, scales = (_join_halves(part) if is_interleaved else part for part in parts)
            return read_mxfp4(blocks, scales, self._target.dtype).on(self._target.device)
        quantized = self._files.quantized(stored, expert)
        if quantized is not None and not (names.is_transposed or is_interleaved):
            return self._join(quantized)
        part = self._files.part(stored, expert)
        matrix = part.T if names.is_transposed else part
        matrix = _join_halves(matrix) if is_interleaved else matrix
        quantizers = QUANTIZERS if is_gate_up else SENSITIVE_QUANTIZERS
        quantize = quantizers[self._target.quantize]
        if not self._can_map(matrix, quantize):
            matrix = self._place(matrix)
        return matrix if quantize is None else quantize(matrix)

    def _can_map(self, tensor: Tensor, quantize: Quantize | None) -> bool:
        """Return whether a matrix of a mapped file can be used without a copy of it."""
        is_copied_later = quantize is not None or self._target.parts.ops.copies_weights
        is_placed = (tensor.dtype, tensor.device) == (self._target.dtype, self._target.device)
        return is_copied_later and is_placed

    def _place(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of a mapped file."""
        placed = torch.empty(tensor.shape, dtype=self._target.dtype, device=self._target.device)
        return placed.copy_(tensor)

    def _stacked(self, names: Sequence[str]) -> Tensor:
        shapes = [self._shapes[name] for name in names]
        shape: Shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        whole = torch.empty(shape, dtype=self._target.dtype, device=self._target.device)
        parts = whole.split([each[0] for each in shapes])
        for name, part in zip(names, parts, strict=True):
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
        return numbers.repeat_interleave(counts)[:, None].to(self._target.device)

    def _matrix(self, names: Sequence[str], quantize: Quantize | None) -> Tensor | Quantized:
        if any(map(self._integer_format, names)):
            return self._load_packed(names)
        stored = self._stored_quantized(names)
        if stored is not None:
            return stored
        matrix = self._mapped(names, quantize)
        if matrix is None:
            matrix = self._stacked([f"{name}.weight" for name in names])
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
        placed = [replace(part, dtype=self._target.dtype).on(self._target.device) for part in parts]
        if self._target.parts.ops.keeps_quantized:
            return stacked([part.with_half_scales() for part in in_one_format(placed)])
        return torch.cat([part.dequantize() for part in placed])

    def _mapped(self, names: Sequence[str], quantize: Quantize | None) -> Tensor | None:
        """Return a matrix without copying it, or None where it needs a copy."""
        if len(names) > 1 or self._is_packed(names[0]) or names[0] in self._row_scales:
            return None
        matrix = self._files.tensor(f"{names[0]}.weight")
        if not self._can_map(matrix, quantize):
            return None
        self._count(matrix.numel())
        return matrix

    def _load_packed(self, names: Sequence[str]) -> Quantized:
        formats = [self._integer_format(name) for name in names]
        known = [how for how in formats if how is not None]
        if len(known) < len(names):
            raise ModelError(f"{', '.join(names)}: some are quantized and some are not")
        parts = list(map(self._load_unpacked, names, known))
        if not have_same_order(parts):
            raise ModelError(f"{', '.join(names)}: their columns have different orders")
        return stacked(parts)

    def _load_unpacked(self, name: str, how: Quantization) -> Quantized:
        shape = self._shapes[f"{name}.weight"]
        unpacked = read_packed(
            name, shape, self._names, how, self._files.tensor, self._target.dtype
        )
        self._count(torch.Size(shape).numel())
        unpacked = unpacked.on(self._target.device)
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
            size = self._target.dtype.itemsize
            self._on_progress(LoadProgress(self._num_loaded * size, self._num_expected * size))


def _join_halves(interleaved: Tensor) -> Tensor:
    """Return the rows with even index, then those with odd index."""
    return torch.cat((interleaved[::2], interleaved[1::2]))
