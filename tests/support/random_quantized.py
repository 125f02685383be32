"""Random matrices of integers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from baton.checkpoint.quantized import Quantized


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


def with_offsets(weight: Quantized) -> Quantized:
    """Return a matrix with offsets in place of its zero points."""
    offsets = -(weight.zeros * weight.scales.float()).to(weight.scales.dtype)
    return replace(weight, zeros=weight.zeros[:, :0], offsets=offsets)
