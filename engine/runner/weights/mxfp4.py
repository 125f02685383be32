"""Reading of MXFP4: 4-bit floats in groups of 32 columns, with powers of two as scales.

Only experts are stored like this, those of a layer in one tensor: blocks [experts, rows, groups,
16] with two codes per byte, and exponents [experts, rows, groups].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from baton.engine.runner.weights.packed import PackedPart, unpack_halves
from baton.engine.runner.weights.quantize import MXFP4_GROUP, Quantized

BYTES = ("U8",)
SMALLEST_SCALE = 0x00400000  # bits of 2^-127


def mxfp4_parts(name: str, shape: tuple[int, int, int]) -> Iterator[PackedPart]:
    """Yield the tensors that store the experts of `shape`, [experts, rows, columns]."""
    experts, rows, columns = shape
    groups = columns // MXFP4_GROUP
    yield PackedPart(f"{name}_blocks", (experts, rows, groups, MXFP4_GROUP // 2), BYTES)
    yield PackedPart(f"{name}_scales", (experts, rows, groups), BYTES)


def read_mxfp4(blocks: Tensor, exponents: Tensor, dtype: torch.dtype) -> Quantized:
    """Return the matrix of one expert, for activations of `dtype`."""
    scales = (exponents.int() << 23).clamp_min(SMALLEST_SCALE).view(torch.float32)
    no_zeros = torch.empty(len(blocks), 0, dtype=torch.uint8)
    numbers = unpack_halves(blocks.flatten(1))
    return Quantized(numbers, scales, no_zeros, 4, MXFP4_GROUP, dtype, is_mxfp4=True)
