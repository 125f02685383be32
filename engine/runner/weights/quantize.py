"""Quantizes weights at load, to integers of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import Quantized, row_chunks

INT4_GROUP = 32
MIN_SCALE = 1e-12
MIN_IMPORTANCE = 1e-3  # of a column, relative to the mean
NUM_FITS = 3  # of a line to the numbers of a group
QUANTIZE_REVISION = 5  # of quantised weights and of what they multiply; part of fingerprints


Quantize = Callable[[Tensor], Quantized]


def to_int8(weight: Tensor) -> Quantized:
    """Quantize symmetrically to 8 bits with one scale per row."""
    rows, columns = weight.shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, 1, device=weight.device)
    for chunk in row_chunks(weight):
        wide = weight[chunk].float()
        scales[chunk] = (wide.abs().amax(dim=1, keepdim=True) / 127).clamp_min(MIN_SCALE)
        numbers[chunk] = (wide / scales[chunk]).round_().add_(128).to(torch.uint8)
    zeros = torch.full((rows, 1), 128, dtype=torch.uint8, device=weight.device)
    return Quantized(numbers, scales, zeros, 8, columns, weight.dtype)


def to_int4(weight: Tensor, importance: Tensor | None = None) -> Quantized:
    """Quantize to 4 bits with a bfloat16 scale and offset per group.

    They are fitted for the least squared error, weighted by the importance of each column.
    """
    rows, columns, group = *weight.shape, INT4_GROUP
    num_groups = -(-columns // group)
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    scales, offsets = torch.empty(2, rows, num_groups, dtype=torch.bfloat16, device=weight.device)
    by_group = _column_weights(weight, importance)

    def fit(chunk: slice) -> None:
        grouped = _by_group(weight[chunk].float())
        scale, offset = _fit_lines(grouped, by_group.repeat(1, len(weight[chunk])))
        found = _nearest_numbers(grouped, scale, offset).to(torch.uint8)
        numbers[chunk] = found.T.reshape(-1, num_groups * group)[:, :columns]
        scales[chunk], offsets[chunk] = (each.view(-1, num_groups) for each in (scale, offset))

    _in_threads(fit, row_chunks(weight))
    no_zeros = torch.empty(rows, 0, dtype=torch.uint8, device=weight.device)
    return Quantized(numbers, scales, no_zeros, 4, group, weight.dtype, offsets=offsets)


def _in_threads(fit: Callable[[slice], None], chunks: Iterable[slice]) -> None:
    """Call `fit` in threads of which each computes alone.

    Torch would divide each small operation among all threads, which wait for each other.
    """
    num_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            num_threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(fit, chunks))
    finally:
        torch.set_num_threads(num_threads)  # new threads take the number that was set last


def _column_weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return weights of errors, [columns of a group, groups], that add up to 1 in each group."""
    if importance is None:
        importance = torch.ones(weight.shape[1])
    relative = importance.float() / importance.float().mean().clamp_min(MIN_SCALE)
    by_group = _by_group(relative.clamp_min(MIN_IMPORTANCE)[None].to(weight.device))
    return by_group / by_group.sum(dim=0)


def _by_group(rows: Tensor) -> Tensor:
    """Return rows as [columns of a group, groups], padded with zeros: long runs of memory."""
    padded = functional.pad(rows, (0, -rows.shape[1] % INT4_GROUP))
    return padded.reshape(-1, INT4_GROUP).T.contiguous()


def _nearest_numbers(grouped: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (grouped - offset).div_(scale).round_().clamp_(0, 15)


def _fit_lines(grouped: Tensor, importance: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset of each group, rounded to bfloat16. Importance adds up to 1.

    Weights are rounded in the range from minimum to maximum of their group. Then, several times, a
    line is fitted to the numbers (linear regression), and weights are rounded to that line.
    """
    offset, highest = grouped.amin(dim=0), grouped.amax(dim=0)
    scale = ((highest - offset) / 15).clamp_min_(MIN_SCALE)
    # Limited, so that rounding errors of the sum leave groups of equal weights exact.
    mean = (grouped * importance).sum(dim=0).clamp_(offset, highest)
    centered = (grouped - mean).mul_(importance)
    products = torch.empty_like(grouped)
    for _ in range(NUM_FITS):
        numbers = _nearest_numbers(grouped, scale, offset)
        number_mean = torch.mul(numbers, importance, out=products).sum(dim=0)
        numbers -= number_mean
        covariance = torch.mul(numbers, centered, out=products).sum(dim=0)
        variance = numbers.square_().mul_(importance).sum(dim=0).clamp_min_(MIN_SCALE)
        scale = (covariance / variance).clamp_min_(MIN_SCALE).bfloat16().float()
        offset = mean - scale * number_mean
    return scale, offset.bfloat16().float()


def select_rows(matrix: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    """Return these rows of a matrix."""
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.rows(rows)
