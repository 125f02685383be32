"""Quantizes weights at load, to integers of 4, 6 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import STEP_COLUMNS, Quantized, row_chunks

GROUP = 32  # columns with a common scale, with 4 or 6 bits
MIN_SCALE = 1e-12
MIN_IMPORTANCE = 1e-3  # of a column, relative to the mean
NUM_FITS = 3  # of a line to the numbers of a group
MAX_MULTIPLE = 127  # of a step
MIN_STEP = 2.0**-24  # of float16
QUANTIZE_REVISION = 7  # of quantised weights and of what they multiply; part of fingerprints


Quantize = Callable[[Tensor], Quantized]


def to_int8(weight: Tensor) -> Quantized:
    """Quantize symmetrically to 8 bits with one scale per row."""
    return _symmetric(weight, 8, weight.shape[1], torch.float32)


def to_int6(weight: Tensor) -> Quantized:
    """Quantize symmetrically to 6 bits with a bfloat16 scale per group."""
    return _symmetric(weight, 6, GROUP, torch.bfloat16)


def _symmetric(weight: Tensor, bits: int, group: int, scale_dtype: torch.dtype) -> Quantized:
    rows, columns = weight.shape
    zero = 1 << (bits - 1)
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    shape = rows, -(-columns // group)
    scales = torch.empty(shape, dtype=scale_dtype, device=weight.device)
    for chunk in row_chunks(weight):
        padded = functional.pad(weight[chunk].float(), (0, -columns % group))
        grouped = padded.unflatten(1, (-1, group))
        scales[chunk] = (grouped.abs().amax(dim=2) / (zero - 1)).clamp_min(MIN_SCALE)
        rounded = (grouped / scales[chunk].float()[:, :, None]).round_().clamp_(-zero, zero - 1)
        numbers[chunk] = rounded.add_(zero).flatten(1)[:, :columns].to(torch.uint8)
    zeros = torch.full(shape, zero, dtype=torch.uint8, device=weight.device)
    return Quantized(numbers, scales, zeros, bits, group, weight.dtype)


def to_int4(weight: Tensor, importance: Tensor | None = None) -> Quantized:
    """Quantize to 4 bits with a scale and offset per group, which are multiples of steps.

    They are fitted for the least squared error, weighted by the importance of each column.
    """
    rows, columns = weight.shape
    num_groups, num_steps = -(-columns // GROUP), -(-columns // STEP_COLUMNS)
    shape = rows, num_groups * GROUP
    numbers = torch.empty(shape, dtype=torch.uint8, device=weight.device)
    scales, offsets = torch.empty(2, rows, num_groups, device=weight.device)
    steps = torch.empty(2, rows, num_steps, dtype=torch.float16, device=weight.device)
    chunks = list(row_chunks(weight))
    weights = _column_weights(weight, importance).repeat(1, chunks[0].stop if chunks else 0)

    def fit(some: Sequence[slice]) -> None:
        memory = torch.empty(4, *weights.shape, device=weight.device)  # new memory is slow
        for chunk in some:
            size = num_groups * (chunk.stop - chunk.start)
            grouped, *buffers = memory[:, :, :size].unbind()
            _copy_groups(weight[chunk], grouped)
            lines = _fit_lines(grouped, weights[:, :size], buffers)
            scale, mean, number_mean = (each.view(-1, num_groups) for each in lines)
            scales[chunk], steps[0, chunk] = _in_steps(scale)
            offsets[chunk], steps[1, chunk] = _in_steps(mean - scales[chunk] * number_mean)
            line = scales[chunk].flatten(), offsets[chunk].flatten()
            numbers[chunk].view(-1, GROUP).copy_(_nearest_numbers(grouped, *line, buffers[0]).T)

    _in_threads(fit, chunks)
    return Quantized(
        numbers[:, :columns],
        scales,
        torch.empty(rows, 0, dtype=torch.uint8, device=weight.device),
        *(4, GROUP, weight.dtype),
        offsets=offsets,
        scale_steps=steps[0],
        offset_steps=steps[1],
    )


def _in_steps(by_group: Tensor) -> tuple[Tensor, Tensor]:
    """Round numbers to whole multiples of a float16 step for STEP_COLUMNS. Return these, too."""
    groups = STEP_COLUMNS // GROUP
    padded = functional.pad(by_group, (0, -by_group.shape[1] % groups)).unflatten(1, (-1, groups))
    smallest = padded.abs().amax(dim=2) / (MAX_MULTIPLE * MIN_STEP)
    steps = smallest.ceil_().clamp_min_(1).mul_(MIN_STEP).half()
    wide = steps.float()[:, :, None]
    multiples = (padded / wide).round_().clamp_(-MAX_MULTIPLE, MAX_MULTIPLE)
    return (multiples * wide).flatten(1)[:, : by_group.shape[1]], steps


def _in_threads(fit: Callable[[Sequence[slice]], None], chunks: Sequence[slice]) -> None:
    """Call `fit` in threads, each of which computes a share of the chunks alone.

    Torch would divide each small operation among all threads, which wait for each other.
    """
    num_threads = torch.get_num_threads()
    shares = [chunks[first::num_threads] for first in range(min(num_threads, len(chunks)))]
    try:
        with ThreadPoolExecutor(
            num_threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            list(pool.map(fit, shares))
    finally:
        torch.set_num_threads(num_threads)  # new threads take the number that was set last


def _column_weights(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Return weights of errors, [columns of a group, groups], that add up to 1 in each group."""
    if importance is None:
        importance = torch.ones(weight.shape[1])
    relative = importance.float() / importance.float().mean().clamp_min(MIN_SCALE)
    columns = relative.clamp_min(MIN_IMPORTANCE)[None].to(weight.device)
    by_group = torch.empty(GROUP, -(-weight.shape[1] // GROUP), device=weight.device)
    _copy_groups(columns, by_group)
    return by_group / by_group.sum(dim=0)


def _copy_groups(rows: Tensor, grouped: Tensor) -> None:
    """Copy rows to [columns of a group, groups], padded with zeros: long runs of memory."""
    padded = functional.pad(rows, (0, -rows.shape[1] % GROUP))
    grouped.copy_(padded.reshape(-1, GROUP).T)


def _nearest_numbers(grouped: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> Tensor:
    torch.sub(grouped, offset, out=out)
    return out.div_(scale.clamp_min(MIN_SCALE)).round_().clamp_(0, 15)


def _fit_lines(
    grouped: Tensor, importance: Tensor, buffers: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale of each group, the mean of its weights and that of their numbers.

    Weights are rounded in the range from minimum to maximum of their group. Then, several times, a
    line is fitted to the numbers (linear regression), and weights are rounded to that line.
    Importance adds up to 1.
    """
    numbers, products, centered = buffers
    offset, highest = grouped.amin(dim=0), grouped.amax(dim=0)
    scale = ((highest - offset) / 15).clamp_min_(MIN_SCALE)
    # Limited, so that rounding errors of the sum leave groups of equal weights exact.
    mean = torch.mul(grouped, importance, out=products).sum(dim=0).clamp_(offset, highest)
    torch.sub(grouped, mean, out=centered).mul_(importance)
    for _ in range(NUM_FITS):
        _nearest_numbers(grouped, scale, offset, numbers)
        number_mean = torch.mul(numbers, importance, out=products).sum(dim=0)
        numbers -= number_mean
        covariance = torch.mul(numbers, centered, out=products).sum(dim=0)
        variance = numbers.mul_(numbers).mul_(importance).sum(dim=0).clamp_min_(MIN_SCALE)
        scale = (covariance / variance).clamp_min_(MIN_SCALE)
        offset = mean - scale * number_mean
    return scale, mean, number_mean


def select_rows(matrix: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    """Return these rows of a matrix."""
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.rows(rows)
