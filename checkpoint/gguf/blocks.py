"""Blocks of quantized GGUF tensors, as matrices of numbers with scales by group.

Dequantized in float32, they give the same bits as ggml. Each decoder takes the blocks of a matrix
as bytes, [blocks, bytes], and returns numbers, scales, and either zero points or offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.checkpoint.gguf.types import BlockType
from baton.checkpoint.quantized import Quantized

IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SMALLEST_SCALE = 0x00400000  # bits of 2^-127


@dataclass(frozen=True, slots=True)
class _Decoded:
    """Numbers [blocks, numbers of a block] as uint8; scales and offsets [blocks, groups]."""

    numbers: Tensor
    scales: Tensor
    zero: int = 0  # if there are no offsets
    offsets: Tensor | None = None
    is_mxfp4: bool = False
    scale_steps: Tensor | None = None  # [blocks, 1]
    offset_steps: Tensor | None = None


def decode_blocks(kind: BlockType, rows: Tensor) -> Quantized:
    """Return the matrix of which `rows` are the bytes, [rows, bytes], for float32 activations."""
    bits, decode = DECODERS[kind.name]
    num_rows = len(rows)
    decoded = decode(rows.reshape(-1, kind.num_bytes))
    by_row = {
        name: None if tensor is None else tensor.reshape(num_rows, -1)
        for name in ("offsets", "scale_steps", "offset_steps")
        for tensor in [getattr(decoded, name)]
    }
    numbers = decoded.numbers.reshape(num_rows, -1)
    scales = decoded.scales.reshape(num_rows, -1)
    has_zeros = decoded.offsets is None and not decoded.is_mxfp4
    return Quantized(
        numbers,
        scales,
        torch.full(scales.shape if has_zeros else (num_rows, 0), decoded.zero, dtype=torch.uint8),
        bits,
        numbers.shape[1] // scales.shape[1],
        torch.float32,
        is_mxfp4=decoded.is_mxfp4,
        **by_row,
    )


def _q4_0(blocks: Tensor) -> _Decoded:
    return _Decoded(_halves(blocks[:, 2:]), _float16(blocks[:, :2]), 8)


def _q4_1(blocks: Tensor) -> _Decoded:
    scales, offsets = _float16(blocks[:, :2]), _float16(blocks[:, 2:4])
    return _Decoded(_halves(blocks[:, 4:]), scales, offsets=offsets)


def _q5_0(blocks: Tensor) -> _Decoded:
    numbers = _halves(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Decoded(numbers + 16, _float16(blocks[:, :2]), 32)  # in the middle of six bits


def _q5_1(blocks: Tensor) -> _Decoded:
    numbers = _halves(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _Decoded(numbers, _float16(blocks[:, :2]), offsets=_float16(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> _Decoded:
    return _Decoded(blocks[:, 2:] ^ 128, _float16(blocks[:, :2]), 128)  # from int8


def _iq4_nl(blocks: Tensor) -> _Decoded:
    values = torch.tensor(IQ4_NL_VALUES, dtype=torch.int16).add(128).to(torch.uint8)
    return _Decoded(values[_halves(blocks[:, 2:]).int()], _float16(blocks[:, :2]), 128)


def _mxfp4(blocks: Tensor) -> _Decoded:
    scales = (blocks[:, :1].int() << 23).clamp_min(SMALLEST_SCALE).view(torch.float32)
    return _Decoded(_halves(blocks[:, 1:]), scales, is_mxfp4=True)


def _q4_k(blocks: Tensor) -> _Decoded:
    return _with_scales_of_eight(_halves_by_group(blocks[:, 16:]), blocks)


def _q5_k(blocks: Tensor) -> _Decoded:
    high = [blocks[:, 16:48] >> group & 1 for group in range(8)]
    numbers = _halves_by_group(blocks[:, 48:]) | torch.cat(high, dim=1) << 4
    return _with_scales_of_eight(numbers, blocks)


def _q6_k(blocks: Tensor) -> _Decoded:
    """Decode six bits: four of `low`, two of `high`, for two halves of 128 numbers each."""
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    numbers = torch.cat((low & 15, low >> 4), dim=2)
    numbers |= torch.cat([(high >> shift & 3) << 4 for shift in (0, 2, 4, 6)], dim=2)
    steps = _float16(blocks[:, 208:])
    scales = steps.float() * blocks[:, 192:208].view(torch.int8).float()
    return _Decoded(numbers.flatten(1), scales, 32, scale_steps=steps)


DECODERS: Mapping[str, tuple[int, Callable[[Tensor], _Decoded]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (6, _q5_0),
    "Q5_1": (6, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q5_K": (6, _q5_k),
    "Q6_K": (6, _q6_k),
    "IQ4_NL": (8, _iq4_nl),
    "MXFP4": (4, _mxfp4),
}


def _float16(numbers: Tensor) -> Tensor:
    """Return the float16 numbers in these bytes."""
    return numbers.contiguous().view(torch.float16)


def _halves(numbers: Tensor) -> Tensor:
    """[…, bytes] → […, 2 * bytes]: the lower halves, then the upper ones."""
    both = torch.empty(*numbers.shape[:-1], 2 * numbers.shape[-1], dtype=torch.uint8)
    lower, upper = both.chunk(2, dim=-1)
    torch.bitwise_and(numbers, 15, out=lower)
    torch.bitwise_right_shift(numbers, 4, out=upper)
    return both


def _halves_by_group(numbers: Tensor) -> Tensor:
    """Split each 32 bytes into their lower halves, then their upper ones."""
    return _halves(numbers.unflatten(1, (-1, 32))).flatten(1)


def _fifth_bits(words: Tensor) -> Tensor:
    """[blocks, 4] → [blocks, 32]: each bit as the fifth of a number."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (words[:, :, None] >> bits & 1).flatten(1) << 4


def _with_scales_of_eight(numbers: Tensor, blocks: Tensor) -> _Decoded:
    """Return numbers with scales and offsets of eight groups, each stored in six bits."""
    low, middle, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), dim=1)
    offsets = torch.cat((middle & 63, mixed >> 4 | middle >> 2 & 48), dim=1)
    steps, offset_steps = _float16(blocks[:, :2]), -_float16(blocks[:, 2:4])
    return _Decoded(
        numbers,
        steps.float() * scales.float(),
        offsets=offset_steps.float() * offsets.float(),
        scale_steps=steps,
        offset_steps=offset_steps,
    )
