"""Launches of Triton kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from baton.engine.runner.device.device import on_device_of


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
