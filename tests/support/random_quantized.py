"""Random matrices of integers, and matrices in formats that only files have."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import STEP_COLUMNS, Quantized


def random_quantized(
    seed: int,
    num_rows: int,
    num_columns: int,
    bits: int,
    group: int,
    scale_dtype: torch.dtype = torch.float32,
) -> Quantized:
    """Return random numbers, scales and zero points, as a quantized folder may contain them."""
    generator = torch.Generator().manual_seed(seed)
    num_groups = -(-num_columns // group)

    def whole(num: int) -> Tensor:
        drawn = torch.randint(0, 1 << bits, (num_rows, num), generator=generator)
        return drawn.to(torch.uint8)

    scales = (torch.rand(num_rows, num_groups, generator=generator) + 0.01).to(scale_dtype)
    numbers, zeros = whole(num_columns), whole(num_groups)
    return Quantized(numbers, scales, zeros, bits, group, torch.bfloat16)


def to_int4_zeros(weight: Tensor) -> Quantized:
    """Quantize to 4 bits with a bfloat16 scale and a zero point for each 32 columns."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % 32)).view(rows, -1, 32)
    lowest, highest = padded.amin(dim=2).clamp_max(0), padded.amax(dim=2).clamp_min(0)
    scales = ((highest - lowest) / 14.9).clamp_min(1e-12).bfloat16()
    wide = scales.float()
    zeros = (-lowest / wide).round()
    numbers = (padded / wide[:, :, None]).round().add(zeros[:, :, None]).clamp(0, 15)
    flat = numbers.flatten(1)[:, :columns].to(torch.uint8)
    return Quantized(flat.contiguous(), scales, zeros.to(torch.uint8), 4, 32, weight.dtype)


def with_offsets(weight: Quantized) -> Quantized:
    """Return a matrix with offsets in place of its zero points."""
    offsets = -(weight.zeros * weight.scales.float()).to(weight.scales.dtype)
    return replace(weight, zeros=weight.zeros[:, :0], offsets=offsets)


def centred(weight: Quantized) -> Quantized:
    """Return a matrix whose zero points are the middle of its numbers."""
    return replace(weight, zeros=torch.full_like(weight.zeros, 1 << (weight.bits - 1)))


def with_steps(weight: Quantized, seed: int, *, has_offsets: bool) -> Quantized:
    """Return a matrix whose scales and offsets are whole multiples of float16 steps.

    Without offsets it is centred.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_groups = weight.scales.shape
    num_steps = -(-weight.numbers.shape[1] // STEP_COLUMNS)
    steps = torch.rand(num_rows, num_steps, generator=generator).add(0.01).half()
    by_group = steps.float().repeat_interleave(STEP_COLUMNS // weight.group, dim=1)

    def multiples(low: int, high: int) -> Tensor:
        drawn = torch.randint(low, high, (num_rows, num_groups), generator=generator)
        return drawn * by_group[:, :num_groups]

    if not has_offsets:
        return replace(centred(weight), scales=multiples(-128, 128), scale_steps=steps)
    return replace(
        weight,
        scales=multiples(0, 64),
        zeros=weight.zeros[:, :0],
        offsets=-multiples(0, 64),
        scale_steps=steps,
        offset_steps=-steps,
    )
