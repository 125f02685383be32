"""Random MXFP4 matrices."""

from __future__ import annotations

import torch

from baton.checkpoint.quantized import MXFP4_GROUP, Quantized


def random_mxfp4(
    seed: int, num_rows: int, num_columns: int, exponents: tuple[int, int] = (-12, 4)
) -> Quantized:
    """Return random codes, and powers of two within these exponents as scales."""
    generator = torch.Generator().manual_seed(seed)
    scales = num_rows, -(-num_columns // MXFP4_GROUP)
    return Quantized(
        torch.randint(0, 16, (num_rows, num_columns), generator=generator).to(torch.uint8),
        torch.ldexp(torch.ones(scales), torch.randint(*exponents, scales, generator=generator)),
        torch.empty(num_rows, 0, dtype=torch.uint8),
        4,
        MXFP4_GROUP,
        torch.bfloat16,
        is_mxfp4=True,
    )
