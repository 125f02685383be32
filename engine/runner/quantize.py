"""Weights as small whole numbers with scales, group by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

INT4_GROUP = 32
ROWS_AT_ONCE = 4096
SMALLEST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix: (numbers - zeros) * scales, a scale and a zero for each row's group of columns."""

    numbers: Tensor  # uint8 [rows, columns]
    scales: Tensor  # float32 [rows, groups]
    zeros: Tensor  # uint8 [rows, groups]: the number that means zero
    bits: int  # 4 or 8, of each number
    group: int  # columns; all of them, or a multiple of eight
    dtype: torch.dtype  # of the states that it is multiplied by
    order: Tensor | None = None  # which column of the states each of these belongs to

    def on(self, device: torch.device) -> Quantized:
        tensors = {name: getattr(self, name).to(device) for name in ("numbers", "scales", "zeros")}
        return replace(self, **tensors, order=None if self.order is None else self.order.to(device))

    def restored(self) -> Tensor:
        """The matrix that it stands for, rounded to the dtype."""
        num_rows, num_columns = self.numbers.shape
        restored = torch.empty_like(self.numbers, dtype=self.dtype)
        for rows in _runs(num_rows):
            zeros, scales = (
                each[rows].repeat_interleave(self.group, dim=1)[:, :num_columns]
                for each in (self.zeros.float(), self.scales)
            )
            restored[rows] = (self.numbers[rows].float() - zeros) * scales
        if self.order is None:
            return restored
        return restored[:, self.order.argsort()]


Quantize = Callable[[Tensor], Quantized]


def to_int8(weight: Tensor) -> Quantized:
    """One scale for each row, and zero in the middle."""
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, 1, device=weight.device)
    for some in _runs(rows):
        wide = weight[some].float()
        scales[some] = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp_min(SMALLEST_SCALE)
        numbers[some] = (wide / scales[some]).round_().add_(128).to(torch.uint8)
    zeros = torch.full((rows, 1), 128, dtype=torch.uint8, device=weight.device)
    return Quantized(numbers, scales, zeros, 8, columns, weight.dtype)


def to_int4(weight: Tensor, group: int = INT4_GROUP) -> Quantized:
    """A scale and a zero for each run of columns, so that its least and its most just fit."""
    rows, columns = weight.shape
    num_groups = -(-columns // group)
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, num_groups, device=weight.device)
    zeros = torch.empty(rows, num_groups, dtype=torch.uint8, device=weight.device)
    for some in _runs(rows):
        padded = functional.pad(weight[some].float(), (0, num_groups * group - columns))
        grouped = padded.unflatten(1, (num_groups, group))
        least, most = grouped.amin(dim=2).clamp_max(0), grouped.amax(dim=2).clamp_min(0)
        scale = ((most - least) / 15).clamp_min(SMALLEST_SCALE)
        zero = (-least / scale).round()
        found = (grouped / scale[:, :, None]).round_().add_(zero[:, :, None]).clamp_(0, 15)
        numbers[some] = found.flatten(1)[:, :columns].to(torch.uint8)
        scales[some], zeros[some] = scale, zero.to(torch.uint8)
    return Quantized(numbers, scales, zeros, 4, group, weight.dtype)


def stacked(parts: Sequence[Quantized]) -> Quantized:
    """One below the other; all have the same form and order."""
    return replace(
        parts[0],
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
    )


def have_one_order(parts: Sequence[Quantized]) -> bool:
    """Whether one product can serve them all."""
    first = parts[0].order
    if first is None:
        return all(part.order is None for part in parts)
    return all(part.order is not None and torch.equal(part.order, first) for part in parts)


def _runs(num_rows: int) -> Iterator[slice]:
    """So that what is between stays small beside the whole."""
    for first in range(0, num_rows, ROWS_AT_ONCE):
        yield slice(first, min(first + ROWS_AT_ONCE, num_rows))
