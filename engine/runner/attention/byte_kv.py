"""Keys and values with one byte for a number, by the dtype of the KV tensor.

int8: the numbers of a token and KV head are followed by one bfloat16 scale. float8_e4m3fn (FP8):
numbers alone; the checkpoint can have scales for the keys and values of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kv_transfer.layout import SCALE_BYTES, KvPacking

NUMBERS = {KvPacking.INT8: torch.int8, KvPacking.FP8: torch.float8_e4m3fn}
PACKINGS = {dtype: packing for packing, dtype in NUMBERS.items()}
MAX_INT8 = 127
MAX_FP8 = 448.0


def packing_of(dtype: torch.dtype) -> KvPacking:
    """Return the packing of a KV tensor."""
    return PACKINGS.get(dtype, KvPacking.PLAIN)


def scale_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of scale that follow the numbers of a token and KV head."""
    return SCALE_BYTES.get(packing_of(dtype), 0)


def quantize(numbers: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Return slots of `dtype` for numbers, [.., size]. Those of other dtypes are the numbers.

    `scales` are those of FP8; none are 1. It saturates, and a NaN remains one.
    """
    if dtype is torch.int8:
        return _quantize_int8(numbers)
    if dtype is not torch.float8_e4m3fn:
        return numbers
    wide = numbers.float() if scales is None else numbers.float() / scales
    return wide.clamp(-MAX_FP8, MAX_FP8).to(dtype)


def dequantize(slots: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """Return the numbers of slots in `dtype`, as `quantize` stores them."""
    if slots.dtype not in PACKINGS:
        return slots.to(dtype)
    size = slots.shape[-1] - scale_bytes(slots.dtype)
    if slots.dtype is torch.int8:
        scales = slots[..., size:].contiguous().view(torch.bfloat16).float()
    wide = slots[..., :size].float()
    return (wide if scales is None else wide * scales).to(dtype)


def _quantize_int8(numbers: Tensor) -> Tensor:
    """Return slots, [.., size + 2].

    The scale is the smallest in bfloat16 with which no number exceeds 127. If a number is not
    finite, the scale is NaN, so that the error is not hidden.
    """
    wide = numbers.float()
    scale = _round_up(wide.abs().amax(dim=-1, keepdim=True) / MAX_INT8)
    whole = (wide / scale).round_().nan_to_num_(0.0)  # 0 / 0, or not finite
    scales = scale.to(torch.bfloat16).view(torch.int8)
    return torch.cat((whole.to(torch.int8), scales), dim=-1)


def _round_up(scales: Tensor) -> Tensor:
    """Round positive numbers up to bfloat16. NaN and infinity become NaN."""
    bits = (scales.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return torch.where(scales.isfinite(), bits.view(torch.float32), torch.nan)
