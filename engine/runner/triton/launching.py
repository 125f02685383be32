"""Launches of Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from baton.engine.runner.device import cuda
from baton.engine.runner.device.device import on_device_of

INTERPRETED_PROCESSORS = 132
PIECE_COLUMNS = 1024  # of a row, that one program of an elementwise kernel computes


def launch(
    kernel: Any, grid: tuple[int, ...], dst: Tensor, *arguments: object, **options: object
) -> None:
    """Launch a kernel on the device of its first argument.

    Multiplications and additions are not fused, so that numbers are rounded as in torch.
    """
    with on_device_of(dst):
        kernel[grid](dst, *arguments, enable_fp_fusion=False, **options)


def row_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if the numbers of a row are not consecutive."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def count_processors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a GPU. The interpreter takes itself for an H100."""
    return cuda.count_processors(device) if device.type == "cuda" else INTERPRETED_PROCESSORS


def pieces(rows: Tensor) -> tuple[int, int]:
    """Return the grid of programs that each compute a piece of a row."""
    return rows.shape[0], -(-rows.shape[1] // PIECE_COLUMNS)
