"""Stored tensors of quantized matrices, and their reading.

- Integers of GPTQ, AWQ and compressed-tensors.
- FP8, with a scale per block, per row or for all numbers. It is dequantized.
- MXFP4: 4-bit floats in groups of 32 columns, with powers of two as scales. Only experts are stored
  like this, those of a layer in one tensor: blocks [experts, rows, groups, 16] with two codes per
  byte, and exponents [experts, rows, groups].
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.checkpoint.quantized import MXFP4_GROUP, Quantized
from baton.checkpoint.weight_files import FLOATS, WHOLE
from baton.core.errors import ModelError
from baton.engine.runner.model.quantization import Packing, Quantization

Shape = tuple[int, ...]
ReadTensor = Callable[[str], Tensor]  # by name

MARKERS = {
    Packing.GPTQ: ".qweight",
    Packing.AWQ: ".qweight",
    Packing.PACKED: ".weight_packed",
    Packing.BYTES: ".weight_scale",
    Packing.FLOAT8: ".weight_scale",
    Packing.FP8: ".weight_scale_inv",
    Packing.MXFP4: "_blocks",
}
OPTIONAL = ("g_idx", "weight_shape", "weight_zero_point", "weight_g_idx")
# Scales of activations, which are not quantized here with fixed scales.
UNUSED = (".input_scale", ".activation_scale", ".output_scale")
# Scales of attention, also in checkpoints whose matrices are not quantized. See `kv_scales`.
ATTENTION_SCALES = (".q_scale", ".k_scale", ".v_scale", ".kv_scale")
SCALES = (*FLOATS, "F8_E8M0")
BYTES = ("U8",)
SMALLEST_SCALE = 0x00400000  # bits of 2^-127
CHUNK_NUMBERS = 1 << 19  # FP8 numbers at a time, so that float32 intermediates stay small
# Column, of the eight in a 32-bit word, of each group of four bits.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class PartAxis(NamedTuple):
    """Axis of a stored tensor: each of its numbers stands for `unit` numbers of the matrix."""

    of: int | None  # axis of the matrix; None: it has `unit` numbers for any matrix
    unit: int = 1


@dataclass(frozen=True, slots=True)
class PackedPart:
    """One of the stored tensors of a quantized matrix."""

    name: str
    shape: Shape
    dtypes: tuple[str, ...]
    axes: tuple[PartAxis, ...]

    @classmethod
    def of(cls, name: str, matrix: Shape, dtypes: tuple[str, ...], *axes: PartAxis) -> PackedPart:
        """Return the part of a matrix of this shape."""
        shape = (unit if of is None else -(-matrix[of] // unit) for of, unit in axes)
        return cls(name, tuple(shape), dtypes, axes)


def is_packed(name: str, names: Collection[str], how: Quantization) -> bool:
    """Return whether the checkpoint stores the linear layer `name` quantized."""
    return f"{name}{MARKERS[how.packing]}" in names


def packed_parts(
    name: str, shape: Shape, names: Collection[str], how: Quantization
) -> Iterator[PackedPart]:
    """Yield the tensors that store a matrix of `shape`; optional ones only if they are present."""
    rows, columns = PartAxis(0), PartAxis(1)
    if how.is_float8:
        yield PackedPart.of(f"{name}.weight", shape, ("F8_E4M3",), rows, columns)
        scale = f"{name}{MARKERS[how.packing]}"
        yield PackedPart.of(scale, shape, SCALES, *_scale_axes(shape, how))
        return
    per_word = 32 // how.bits
    groups = PartAxis(1, how.group or shape[1])
    row_words, column_words = PartAxis(0, per_word), PartAxis(1, per_word)
    by_packing: dict[Packing, dict[str, tuple[PartAxis, ...]]] = {
        Packing.GPTQ: {
            "qweight": (column_words, rows),
            "qzeros": (groups, row_words),
            "scales": (groups, rows),
            "g_idx": (columns,),
        },
        Packing.AWQ: {
            "qweight": (columns, row_words),
            "qzeros": (groups, row_words),
            "scales": (groups, rows),
        },
        Packing.PACKED: {
            "weight_packed": (rows, column_words),
            "weight_scale": (rows, groups),
            "weight_shape": (PartAxis(None, 2),),
            "weight_zero_point": (row_words, groups),
            "weight_g_idx": (columns,),
        },
        Packing.BYTES: {
            "weight": (rows, columns),
            "weight_scale": (rows, groups),
            "weight_zero_point": (rows, groups),
        },
    }
    for suffix, axes in by_packing[how.packing].items():
        part = f"{name}.{suffix}"
        if part in names or suffix not in OPTIONAL:
            is_scale = suffix in ("scales", "weight_scale")
            yield PackedPart.of(part, shape, FLOATS if is_scale else WHOLE, *axes)


def read_packed(
    name: str,
    shape: Shape,
    names: Collection[str],
    how: Quantization,
    read_tensor: ReadTensor,
    dtype: torch.dtype,
) -> Quantized:
    """Read the matrix `name`, for activations of `dtype`."""
    parts = packed_parts(name, shape, names, how)
    tensors = {part.name.rpartition(".")[2]: read_tensor(part.name) for part in parts}
    numbers, scales, zeros = READERS[how.packing](tensors, how)
    group = how.group or shape[1]
    matrix = Quantized(numbers, scales, zeros, how.bits, group, dtype)
    groups = tensors.get("g_idx", tensors.get("weight_g_idx"))
    return matrix if groups is None else _sort_columns(name, matrix, groups)


Tensors = Mapping[str, Tensor]
Parts = tuple[Tensor, Tensor, Tensor]  # numbers, scales and zero points, row-major


def _gptq(tensors: Tensors, how: Quantization) -> Parts:
    zeros = _unpack(tensors["qzeros"], how.bits).T + int(how.counts_zeros_from_one)
    return _unpack(tensors["qweight"].T, how.bits), tensors["scales"].T, zeros


def _awq(tensors: Tensors, _: Quantization) -> Parts:
    numbers, zeros = (_unpack_awq(tensors[part]).T for part in ("qweight", "qzeros"))
    return numbers, tensors["scales"].T, zeros


def _unpack_awq(words: Tensor) -> Tensor:
    stored = _unpack(words, 4).unflatten(1, (-1, len(AWQ_ORDER)))
    ordered = torch.empty_like(stored)
    ordered[:, :, list(AWQ_ORDER)] = stored
    return ordered.flatten(1)


def _words(tensors: Tensors, how: Quantization) -> Parts:
    scales = tensors["weight_scale"]
    if "weight_zero_point" in tensors:
        zeros = _unpack(tensors["weight_zero_point"].T, how.bits).T
    else:
        zeros = torch.full(scales.shape, 1 << (how.bits - 1), dtype=torch.uint8)
    return _unpack(tensors["weight_packed"], how.bits), scales, zeros


def _bytes(tensors: Tensors, _: Quantization) -> Parts:
    scales = tensors["weight_scale"]
    zeros = tensors.get("weight_zero_point", torch.zeros(scales.shape, dtype=torch.int8))
    numbers, zeros = ((each.int() + 128).to(torch.uint8) for each in (tensors["weight"], zeros))
    return numbers, scales, zeros


READERS: Mapping[Packing, Callable[[Tensors, Quantization], Parts]] = {
    Packing.GPTQ: _gptq,
    Packing.AWQ: _awq,
    Packing.PACKED: _words,
    Packing.BYTES: _bytes,
}


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[rows, words] → [rows, numbers], lowest bits of a word first."""
    # A tensor with one word per row counts as contiguous with any stride: clone it.
    numbers = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return numbers if bits == 8 else unpack_halves(numbers)


def unpack_halves(numbers: Tensor) -> Tensor:
    """[.., bytes] → [.., 2 * bytes], lower half of a byte first."""
    words = numbers.to(torch.int16)
    words |= words << 4
    words &= 0x0F0F
    return words.view(torch.uint8)  # the lower byte comes first


def _sort_columns(name: str, matrix: Quantized, groups: Tensor) -> Quantized:
    """Sort the columns by group. `groups` has the group index of each column (act-order)."""
    order = groups.argsort(stable=True)
    expected = torch.arange(len(groups)) // matrix.group
    if not torch.equal(groups[order].to(expected.dtype), expected):
        raise ModelError(f"{name}: its columns do not form whole groups of {matrix.group}")
    if torch.equal(order, torch.arange(len(order))):
        return matrix
    return replace(matrix, numbers=matrix.numbers[:, order], order=order)


def _scale_axes(shape: Shape, how: Quantization) -> tuple[PartAxis, ...]:
    """Return the axes of the scales of a matrix of `shape`."""
    if how.block is None:
        return (PartAxis(None),) if how.packing is Packing.FLOAT8 else ()
    rows, columns = how.block
    return PartAxis(0, rows), PartAxis(1, columns or shape[1])


def dequantize_float8(
    destination: Tensor, weight: Tensor, scale: Tensor, how: Quantization
) -> None:
    """Write `weight` * `scale` into `destination`, rounded to its dtype."""
    block_rows, block_columns = how.block or (len(weight), 0)
    scale = scale.float().reshape(-(-len(weight) // block_rows), -1)
    step = max(1, CHUNK_NUMBERS // weight.shape[1])
    for first in range(0, len(weight), step):
        wide = weight[first : first + step].float()
        scales = scale[torch.arange(first, first + len(wide)) // block_rows]
        if block_columns:
            scales = scales.repeat_interleave(block_columns, dim=1)[:, : wide.shape[1]]
        destination[first : first + step] = wide.mul_(scales)


def mxfp4_parts(name: str, shape: Shape, *, is_transposed: bool) -> Iterator[PackedPart]:
    """Yield the tensors that store experts of `shape`, [experts, rows, columns] or transposed."""
    rows, columns = (2, 1) if is_transposed else (1, 2)
    groups = PartAxis(0), PartAxis(rows), PartAxis(columns, MXFP4_GROUP)
    yield PackedPart.of(f"{name}_blocks", shape, BYTES, *groups, PartAxis(None, MXFP4_GROUP // 2))
    yield PackedPart.of(f"{name}_scales", shape, BYTES, *groups)


def read_mxfp4(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Quantized:
    """Return the matrix of one expert, for activations of `dtype`."""
    scales = (exponents.int() << 23).clamp_min(SMALLEST_SCALE).view(torch.float32)
    no_zeros = torch.empty(len(blocks), 0, dtype=torch.uint8)
    numbers = unpack_halves(blocks.flatten(1))
    return Quantized(numbers, scales, no_zeros, 4, MXFP4_GROUP, dtype, is_mxfp4=True)
