"""Corrections of Triton's interpreter, which runs kernels on a CPU to test them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import language
from triton.runtime import interpreter


@cache
def correct_bfloat16() -> None:
    """Make the interpreter compute with bfloat16 as GPUs do.

    That of Triton 3.9 truncates instead of rounding to the nearest number, and multiplies the bits
    of matrices as integers.
    """
    builder = interpreter.InterpreterBuilder
    cast, multiply = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (language.float32, language.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view("uint16"), dst_type.scalar)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return multiply(self, _widened(self, a), _widened(self, b), *others)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def _widened(builder: Any, matrix: Any) -> Any:
    is_bfloat16 = matrix.dtype.scalar == language.bfloat16
    return builder.cast_impl(matrix, language.float32) if is_bfloat16 else matrix
