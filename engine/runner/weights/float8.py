"""Dequantization of FP8 matrices, which have a scale per block, per row or for all numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.runner.weights.quantization import Packing, Quantization

CHUNK_NUMBERS = 1 << 19  # so that float32 intermediates stay small


def scale_shape(shape: tuple[int, ...], how: Quantization) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix of `shape`."""
    if how.block is None:
        return (1,) if how.packing is Packing.FLOAT8 else ()
    rows, columns = shape
    block_rows, block_columns = how.block
    return -(-rows // block_rows), -(-columns // (block_columns or columns))


def dequantize_into(destination: Tensor, weight: Tensor, scale: Tensor, how: Quantization) -> None:
    """Write `weight` * `scale` into `destination`, rounded to its dtype."""
    block_rows, block_columns = how.block or (len(weight), 0)
    scale = scale.float().reshape(-(-len(weight) // block_rows), -1)
    step = max(1, CHUNK_NUMBERS // weight.shape[1])
    for first in range(0, len(weight), step):
        wide = weight[first : first + step].float()
        scales = scale[torch.arange(first, first + len(wide)) // block_rows]
        if block_columns:
            scales = scales.repeat_interleave(block_columns, dim=1)[:, : wide.shape[1]]
        destination[first : first + step] = wide.mul_(scales)
