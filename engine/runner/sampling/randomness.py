"""Counter-based random numbers: a pure function of (seed, position, token)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.model.pass_layout import Ints

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> Ints:
    """Return a key of the random numbers of each row."""
    pairs = zip(seeds, positions, strict=True)
    keys = [_to_signed(_mix(_mix(seed) + position)) for seed, position in pairs]
    return np.array(keys, dtype=np.int64)


def exponential_numbers(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return Exponential(1) numbers for each row's tokens, [rows, tokens] in float32.

    The argmax of weight / number is a draw by weight (Gumbel-max trick). A token's number
    depends neither on the other rows nor on the other tokens of the row, and a small error in
    the weights changes the result only in a near tie. `keys`: [rows, 1].
    """
    bits = _mix_in_place(((token_ids + 1) * _to_signed(GOLDEN)).add_(keys))
    bits.bitwise_right_shift_(1).bitwise_and_(MASK >> 1)
    # 63 bits keep the precision near zero, where it matters; adding a half avoids zero.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-63)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix(value: int) -> int:
    """Return the splitmix64 hash of an integer, modulo 2**64."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def _mix_in_place(value: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser to an int64 tensor.

    Products wrap as needed; shifts are arithmetic, so the copied sign bits are masked off.
    """
    shifted = torch.empty_like(value)
    for num_bits, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(value, num_bits, out=shifted)
        value.bitwise_xor_(shifted.bitwise_and_(MASK >> num_bits)).mul_(_to_signed(factor))
    return value


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
