"""Layout of a matrix in the memory of a GPU, as the product kernels read it.

The columns of a quantized matrix are cut into pieces: some whole groups, or a part of one. A piece
of all rows is stored together, so that a program reads a run of bytes. Two numbers of 4 bits share
a byte, the first in its lower half; others have 8 bits. The scales of all rows follow, group by
group, and then zero points or offsets. Groups are padded with zeros so that pieces are whole, and
rows to whole tiles.

A plain matrix is stored row by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.weights.packed_weight import PackedWeight

MIN_PIECE = 16  # columns that are multiplied at a time: tensor cores need that many
MAX_PIECE = {2: 128, 4: 32}  # columns, by the size of the activations' numbers
PLAIN_PIECE = 64
PADDED_ROWS = 64  # rows are padded to multiples of it: the most of a tile
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_DTYPES = (tl.float32, tl.bfloat16, tl.float16)


class Kind(Enum):
    """Meaning of the stored numbers."""

    PLAIN = "plain"
    ZEROS = "zeros"  # (numbers - zeros) * scales
    OFFSETS = "offsets"  # numbers * scales + offsets
    MXFP4 = "mxfp4"  # values of 4-bit floats * scales


KINDS = tuple(Kind)


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Places in a stored matrix: constants of a kernel.

    A kernel is compiled for their text, so that all that it reads is a field and none a property.
    """

    kind: str
    bits: int  # stored per number
    num_rows: int
    num_columns: int
    group_size: int
    padded_group: int
    piece: int  # columns
    num_pieces: int
    groups_per_piece: int  # at least 1
    pieces_per_group: int  # at least 1
    padded_rows: int
    scale_dtype: tl.dtype
    scale_place: int  # bytes from the start
    second_place: int  # of zero points or offsets
    num_bytes: int


def plain_layout(num_rows: int, num_columns: int) -> MatrixLayout:
    return MatrixLayout(
        kind=Kind.PLAIN.value,
        bits=0,
        num_rows=num_rows,
        num_columns=num_columns,
        group_size=PLAIN_PIECE,
        padded_group=PLAIN_PIECE,
        piece=PLAIN_PIECE,
        num_pieces=triton.cdiv(num_columns, PLAIN_PIECE),
        groups_per_piece=1,
        pieces_per_group=1,
        padded_rows=num_rows,
        scale_dtype=tl.float32,
        scale_place=0,
        second_place=0,
        num_bytes=0,
    )


def packed_layout(
    kind: Kind,
    bits: int,
    num_rows: int,
    num_columns: int,
    group: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> MatrixLayout:
    """Return the layout of a quantized matrix, for activations of `dtype`."""
    group, max_piece = min(group, num_columns), MAX_PIECE[dtype.itemsize]
    num_groups = triton.cdiv(num_columns, group)
    if group <= max_piece:
        padded_group = triton.next_power_of_2(group)
        piece = max(MIN_PIECE, min(max_piece, triton.next_power_of_2(padded_group * num_groups)))
    else:
        padded_group, piece = _padded(group, max_piece), max_piece
    groups_per_piece, pieces_per_group = (
        max(1, piece // padded_group),
        max(1, padded_group // piece),
    )
    num_groups = _padded(num_groups, groups_per_piece)
    num_pieces = num_groups * padded_group // piece
    padded_rows = _padded(num_rows, PADDED_ROWS)
    scale_place = num_pieces * padded_rows * piece * bits // 8
    second_place = scale_place + num_groups * padded_rows * scale_dtype.itemsize
    second_size = {Kind.ZEROS: 1, Kind.OFFSETS: scale_dtype.itemsize, Kind.MXFP4: 0}[kind]
    return MatrixLayout(
        kind=kind.value,
        bits=bits,
        num_rows=num_rows,
        num_columns=num_columns,
        group_size=group,
        padded_group=padded_group,
        piece=piece,
        num_pieces=num_pieces,
        groups_per_piece=groups_per_piece,
        pieces_per_group=pieces_per_group,
        padded_rows=padded_rows,
        scale_dtype=TRITON_DTYPES[DTYPES.index(scale_dtype)],
        scale_place=scale_place,
        second_place=second_place,
        num_bytes=second_place + num_groups * padded_rows * second_size,
    )


def pack(weight: Tensor | Quantized) -> PackedWeight:
    """Return a matrix in its layout, on its device. Numbers of 6 bits are stored in 8."""
    if isinstance(weight, Tensor):
        data = weight.contiguous()
        fields = _fields(Kind.PLAIN, 0, data, 0, torch.float32, weight.dtype)
        return PackedWeight(fields, data.view(torch.uint8).flatten())
    weight = weight.without_steps()
    kind, scales = _kind(weight), weight.scales
    if kind is Kind.MXFP4:
        scales = scales.bfloat16()  # has every power of two of float32
    bits = 4 if weight.bits == 4 else 8
    fields = _fields(kind, bits, weight.numbers, weight.group, scales.dtype, weight.dtype)
    layout = layout_of(fields)
    parts = [_pack_numbers(weight.numbers, layout), _pack_factors(scales, layout)]
    if kind is Kind.ZEROS:
        parts.append(_pack_factors(weight.zeros, layout))
    if weight.offsets is not None:
        parts.append(_pack_factors(weight.offsets.to(scales.dtype), layout))
    return PackedWeight(fields, torch.cat(parts), weight.order)


def layout_of(fields: Mapping[str, int]) -> MatrixLayout:
    """Return the layout of a packed matrix."""
    size = fields["num_rows"], fields["num_columns"]
    kind = KINDS[fields["kind"]]
    if kind is Kind.PLAIN:
        return plain_layout(*size)
    scale_dtype = DTYPES[fields["scale_dtype"]]
    group, dtype = fields["group_size"], dtype_of(fields)
    return packed_layout(kind, fields["bits"], *size, group, scale_dtype, dtype)


def dtype_of(fields: Mapping[str, int]) -> torch.dtype:
    """Return the dtype of a packed matrix when it is dequantized."""
    return DTYPES[fields["dtype"]]


def _fields(
    kind: Kind,
    bits: int,
    numbers: Tensor,
    group_size: int,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
) -> dict[str, int]:
    num_rows, num_columns = numbers.shape
    return {
        "kind": KINDS.index(kind),
        "bits": bits,
        "num_rows": num_rows,
        "num_columns": num_columns,
        "group_size": group_size,
        "scale_dtype": DTYPES.index(scale_dtype),
        "dtype": DTYPES.index(dtype),
    }


def _kind(weight: Quantized) -> Kind:
    if weight.is_mxfp4:
        return Kind.MXFP4
    return Kind.ZEROS if weight.offsets is None else Kind.OFFSETS


def _pack_numbers(numbers: Tensor, layout: MatrixLayout) -> Tensor:
    """[rows, columns] → bytes of [pieces, rows, columns of a piece]."""
    num_rows, num_columns = numbers.shape
    num_groups = triton.cdiv(num_columns, layout.group_size)
    missing = num_groups * layout.group_size - num_columns
    grouped = functional.pad(numbers, (0, missing)).unflatten(1, (num_groups, layout.group_size))
    size = layout.padded_rows, _num_groups(layout), layout.padded_group
    padded = numbers.new_zeros(size)
    padded[:num_rows, :num_groups, : layout.group_size] = grouped
    pieces = padded.view(layout.padded_rows, layout.num_pieces, layout.piece)
    if layout.bits == 4:
        pieces = pieces[..., ::2] | pieces[..., 1::2] << 4
    return pieces.transpose(0, 1).flatten()


def _pack_factors(factors: Tensor, layout: MatrixLayout) -> Tensor:
    """[rows, groups] → bytes of [groups, rows]."""
    num_rows, num_groups = factors.shape
    padded = factors.new_zeros(_num_groups(layout), layout.padded_rows)
    padded[:num_groups, :num_rows] = factors.T
    return padded.flatten().view(torch.uint8)


def _num_groups(layout: MatrixLayout) -> int:
    """Return the number of groups, padding among them."""
    return layout.num_pieces * layout.piece // layout.padded_group


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
