"""A quantized matrix as the kernels pack it: numbers of 4, 6 or 8 bits, scaled by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

MXFP4_GROUP = 32
STEP_COLUMNS = 256
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_VALUES = torch.tensor((*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES)))  # by code
CHUNK_NUMBERS = 1 << 19  # intermediates of that many numbers stay in the CPU caches


@dataclass(frozen=True, slots=True)
class Quantized:
    """Quantized matrix: (numbers - zeros) * scales, with scale and zero point per row and group.

    With offsets it is numbers * scales + offsets, and `zeros` has no columns. Numbers of MXFP4 are
    codes of 4-bit floats: FP4_VALUES[numbers] * scales. Their scales are powers of two, and `zeros`
    has no columns either.
    """

    numbers: Tensor  # uint8 [rows, columns]
    scales: Tensor  # [rows, groups]: float32, bfloat16 or float16; float32 for MXFP4
    zeros: Tensor  # uint8 [rows, groups]: zero points
    bits: int  # per number: 4, 6 or 8
    group: int  # group size in columns: all columns, or a multiple of eight
    dtype: torch.dtype  # for activations
    order: Tensor | None = None  # activation column of each of these columns (GPTQ act-order)
    is_mxfp4: bool = False
    offsets: Tensor | None = None  # [rows, groups], in the dtype of the scales
    # float16 [rows, steps], one for STEP_COLUMNS: scales and offsets are whole multiples, by int8.
    scale_steps: Tensor | None = None
    offset_steps: Tensor | None = None

    @property
    def format(self) -> tuple[object, ...]:
        """Return the properties that stacked matrices must have in common."""
        has_offsets, has_steps = self.offsets is not None, self.scale_steps is not None
        return self.bits, self.group, self.scales.dtype, self.is_mxfp4, has_offsets, has_steps

    def on(self, device: torch.device) -> Quantized:
        return self._with(lambda tensor: tensor.to(device), "order")

    def rows(self, rows: Tensor) -> Quantized:
        """Return these rows of the matrix."""
        return self._with(lambda tensor: tensor[rows])

    def columns(self, order: Tensor) -> Quantized | None:
        """Return the matrix with its columns in this order, None if that divides a group."""
        groups = order.unflatten(0, (-1, self.group)) if len(order) % self.group == 0 else None
        if groups is None or not torch.equal(groups, groups[:, :1] + torch.arange(self.group)):
            return None
        firsts = groups[:, 0] // self.group
        if not torch.equal(firsts * self.group, groups[:, 0]):
            return None
        offsets = None if self.offsets is None else self.offsets[:, firsts]
        return replace(
            self,
            numbers=self.numbers[:, order],
            scales=self.scales[:, firsts],
            zeros=self.zeros[:, firsts] if self.zeros.shape[1] else self.zeros,
            offsets=offsets,
            scale_steps=None,
            offset_steps=None,
        )

    def scaled(self, factors: Tensor) -> Quantized:
        """Return the matrix with each row multiplied by its factor, [rows, 1]."""
        changed = replace(self, scales=(self.scales * factors).to(self.scales.dtype))
        if self.offsets is None:
            return changed
        return replace(changed, offsets=(self.offsets * factors).to(self.offsets.dtype))

    def with_half_scales(self) -> Quantized:
        """Return the matrix with scales and offsets of 16 bits, off by at most a 2048th.

        Those that are multiples of steps stay exact.
        """
        if self.is_mxfp4 or self.scales.dtype != torch.float32 or self.scale_steps is not None:
            return self
        offsets = None if self.offsets is None else self.offsets.half()
        return replace(self, scales=self.scales.half(), offsets=offsets)

    def without_steps(self) -> Quantized:
        """Return the matrix with scales and offsets of 16 bits instead of multiples of steps."""
        if self.scale_steps is None:
            return self
        return replace(self, scale_steps=None, offset_steps=None).with_half_scales()

    def dequantize(self) -> Tensor:
        """Return the dequantized matrix, rounded to `dtype`."""
        # Contiguous even where the numbers are not: products depend on the layout.
        restored = torch.empty(self.numbers.shape, dtype=self.dtype, device=self.numbers.device)
        for rows in row_chunks(self.numbers):
            scaled = self._unscaled(rows) * self._by_column(self.scales[rows].float())
            if self.offsets is not None:
                scaled += self._by_column(self.offsets[rows].float())
            restored[rows] = scaled
        if self.order is None:
            return restored
        return restored[:, self.order.argsort()]

    def _with(self, change: Callable[[Tensor], Tensor], *others: str) -> Quantized:
        """Return a matrix whose tensors are changed, `others` among them."""
        names = ("numbers", "scales", "zeros", "offsets", "scale_steps", "offset_steps", *others)
        found: dict[str, Any] = {name: getattr(self, name) for name in names}
        changed: dict[str, Any] = {
            name: change(each) for name, each in found.items() if each is not None
        }
        return replace(self, **changed)

    def _unscaled(self, rows: slice) -> Tensor:
        numbers = self.numbers[rows]
        if self.is_mxfp4:
            return FP4_VALUES.to(numbers.device)[numbers.int()]
        if self.offsets is not None:
            return numbers.float()
        return numbers.float() - self._by_column(self.zeros[rows].float())

    def _by_column(self, by_group: Tensor) -> Tensor:
        return by_group.repeat_interleave(self.group, dim=1)[:, : self.numbers.shape[1]]


def in_one_format(parts: Sequence[Quantized]) -> list[Quantized]:
    """Return matrices in one format that is exact for all of them, but for float32 rounding."""
    if len({part.format for part in parts}) == 1:
        return list(parts)
    plain = [_without_codes(part) for part in parts]
    bits, group = max(part.bits for part in plain), math.gcd(*(part.group for part in plain))
    has_offsets = any(part.offsets is not None for part in plain)
    if any(part.scale_steps is None for part in plain):
        plain = [part.without_steps() for part in plain]
    return [_refined(part, bits, group, has_offsets=has_offsets) for part in plain]


def _without_codes(matrix: Quantized) -> Quantized:
    """Return MXFP4 as integers: twice the values are whole numbers from -12 to 12."""
    if not matrix.is_mxfp4:
        return matrix
    values = FP4_VALUES.mul(2).add(12).to(torch.uint8)
    return replace(
        matrix,
        numbers=values[matrix.numbers.int()],
        scales=matrix.scales / 2,
        zeros=torch.full(matrix.scales.shape, 12, dtype=torch.uint8),
        bits=6,
        is_mxfp4=False,
    )


def _refined(matrix: Quantized, bits: int, group: int, *, has_offsets: bool) -> Quantized:
    """Return a matrix in a format with more bits, smaller groups or offsets."""
    times = matrix.group // group
    scales = matrix.scales.float().repeat_interleave(times, dim=1)
    zeros = matrix.zeros.repeat_interleave(times, dim=1)
    changed = replace(matrix, scales=scales, zeros=zeros, bits=bits, group=group)
    if not has_offsets:
        return changed
    if matrix.offsets is not None:
        offsets = matrix.offsets.float().repeat_interleave(times, dim=1)
        return replace(changed, zeros=zeros[:, :0], offsets=offsets)
    steps = matrix.scale_steps
    if steps is not None:  # zero points of types with steps are all the same
        steps = -steps * int(zeros[0, 0])
    offsets = -(zeros.float() * scales)
    return replace(changed, zeros=zeros[:, :0], offsets=offsets, offset_steps=steps)


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """Concatenate matrices by row. All must have the same format and column order."""
    if len(parts) == 1:
        return parts[0]
    return replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
        offsets=_concatenated([part.offsets for part in parts]),
        scale_steps=_concatenated([part.scale_steps for part in parts]),
        offset_steps=_concatenated([part.offset_steps for part in parts]),
    )


def _concatenated(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return None if there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def have_same_order(parts: Sequence[Quantized]) -> bool:
    """Return whether all parts have the same column order, so that they can be stacked."""
    first = parts[0].order
    if first is None:
        return all(part.order is None for part in parts)
    return all(part.order is not None and torch.equal(part.order, first) for part in parts)


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Split the rows of a matrix into chunks of about CHUNK_NUMBERS."""
    num_rows, num_columns = matrix.shape
    step = max(1, CHUNK_NUMBERS // max(1, num_columns))
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))
