"""Keys and values as int8: the numbers of a token and KV head, and then one bfloat16 scale."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
MAX_NUMBER = 127


def quantize(numbers: Tensor) -> Tensor:
    """Return slots of int8, [.., size + SCALE_BYTES], for numbers, [.., size].

    The scale is the smallest in bfloat16 with which no number exceeds 127. If a number is not
    finite, the scale is NaN, so that the error is not hidden.
    """
    wide = numbers.float()
    scale = _round_up(wide.abs().amax(dim=-1, keepdim=True) / MAX_NUMBER)
    whole = (wide / scale).round_().nan_to_num_(0.0)  # 0 / 0, or not finite
    scales = scale.to(torch.bfloat16).view(torch.int8)
    return torch.cat((whole.to(torch.int8), scales), dim=-1)


def dequantize(slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of slots, [.., size + SCALE_BYTES]."""
    size = slots.shape[-1] - SCALE_BYTES
    scales = slots[..., size:].contiguous().view(torch.bfloat16)
    return (slots[..., :size].float() * scales.float()).to(dtype)


def _round_up(scales: Tensor) -> Tensor:
    """Round positive numbers up to bfloat16. NaN and infinity become NaN."""
    bits = (scales.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return torch.where(scales.isfinite(), bits.view(torch.float32), torch.nan)
