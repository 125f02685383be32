"""Weights of 4 or 8 bits with scales by group: integers with zero points, or MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

INT4_GROUP = 32
MXFP4_GROUP = 32
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = torch.tensor((*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES)))  # by code
CHUNK_NUMBERS = 1 << 19  # intermediates of that many numbers stay in the CPU caches
MIN_SCALE = 1e-12
QUANTIZE_REVISION = 2  # results of to_int8 and to_int4; part of fingerprints


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized matrix: (numbers - zeros) * scales, with scale and zero point per row and group.

    Numbers of MXFP4 are codes of 4-bit floats instead: FP4_VALUES[numbers] * scales. The scales are
    powers of two, and `zeros` has no columns.
    """

    numbers: Tensor  # uint8 [rows, columns]
    scales: Tensor  # [rows, groups]: float32, bfloat16 or float16; float32 for MXFP4
    zeros: Tensor  # uint8 [rows, groups]: zero points
    bits: int  # per number: 4 or 8
    group: int  # group size in columns: all columns, or a multiple of eight
    dtype: torch.dtype  # for activations
    order: Tensor | None = None  # activation column of each of these columns (GPTQ act-order)
    is_mxfp4: bool = False

    def on(self, device: torch.device) -> Quantized:
        tensors = {name: getattr(self, name).to(device) for name in ("numbers", "scales", "zeros")}
        return replace(self, **tensors, order=None if self.order is None else self.order.to(device))

    def dequantize(self) -> Tensor:
        """Return the dequantized matrix, rounded to `dtype`."""
        restored = torch.empty_like(self.numbers, dtype=self.dtype)
        for rows in _row_chunks(self.numbers):
            restored[rows] = self._unscaled(rows) * self._by_column(self.scales[rows].float())
        if self.order is None:
            return restored
        return restored[:, self.order.argsort()]

    def _unscaled(self, rows: slice) -> Tensor:
        numbers = self.numbers[rows]
        if self.is_mxfp4:
            return FP4_VALUES.to(numbers.device)[numbers.int()]
        return numbers.float() - self._by_column(self.zeros[rows].float())

    def _by_column(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group, dim=1)[:, : self.numbers.shape[1]]


Quantize = Callable[[Tensor], Quantized]


def to_int8(weight: Tensor) -> Quantized:
    """Quantize symmetrically to 8 bits with one scale per row."""
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, 1, device=weight.device)
    for chunk in _row_chunks(weight):
        wide = weight[chunk].float()
        scales[chunk] = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp_min(MIN_SCALE)
        numbers[chunk] = (wide / scales[chunk]).round_().add_(128).to(torch.uint8)
    zeros = torch.full((rows, 1), 128, dtype=torch.uint8, device=weight.device)
    return Quantized(numbers, scales, zeros, 8, columns, weight.dtype)


def to_int4(weight: Tensor) -> Quantized:
    """Quantize to 4 bits with a scale and zero point per group, from its minimum and maximum.

    Scales are bfloat16, rounded up so that both ends of a group are in range.
    """
    rows, columns, group = *weight.shape, INT4_GROUP
    num_groups = -(-columns // group)
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, num_groups, dtype=torch.bfloat16, device=weight.device)
    zeros = torch.empty(rows, num_groups, dtype=torch.uint8, device=weight.device)
    for chunk in _row_chunks(weight):
        padded = functional.pad(weight[chunk].float(), (0, num_groups * group - columns))
        grouped = padded.unflatten(1, (num_groups, group))
        lowest, highest = grouped.amin(dim=2).clamp_max(0), grouped.amax(dim=2).clamp_min(0)
        scale = _round_up_to_bfloat16(((highest - lowest) / 15).clamp_min(MIN_SCALE))
        zero = (-lowest / scale).round()
        rounded = (grouped / scale[:, :, None]).round_().add_(zero[:, :, None]).clamp_(0, 15)
        numbers[chunk] = rounded.flatten(1)[:, :columns].to(torch.uint8)
        scales[chunk], zeros[chunk] = scale, zero.to(torch.uint8)
    return Quantized(numbers, scales, zeros, 4, group, weight.dtype)


def _round_up_to_bfloat16(numbers: Tensor) -> Tensor:
    """Round positive float32 numbers up to numbers that bfloat16 holds exactly."""
    return ((numbers.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Concatenate matrices by row. All must have the same bits, group size and column order."""
    return replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )


def select_rows(matrix: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    """Return these rows of a matrix."""
    if isinstance(matrix, Tensor):
        return matrix[rows]
    parts = {name: getattr(matrix, name)[rows] for name in ("numbers", "scales", "zeros")}
    return replace(matrix, **parts)


def have_same_order(parts: Sequence[Quantized]) -> bool:
    """Return whether all parts have the same column order, so that they can be stacked."""
    first = parts[0].order
    if first is None:
        return all(part.order is None for part in parts)
    return all(part.order is not None and torch.equal(part.order, first) for part in parts)


def _row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Split the rows of a matrix into chunks of about CHUNK_NUMBERS."""
    num_rows, num_columns = matrix.shape
    step = max(1, CHUNK_NUMBERS // max(1, num_columns))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))
