"""Corrections of Triton's interpreter, which runs kernels on a CPU to test them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from triton import language
from triton.runtime import interpreter


@cache
def correct_interpreter() -> None:
    """Make the interpreter compute as GPUs do.

    That of Triton 3.9 truncates to bfloat16 instead of rounding to the nearest number, and
    multiplies its bits in matrices as integers. Its products are those of numpy, in which the bits
    of a row can depend on its place in the matrix.
    """
    builder = interpreter.InterpreterBuilder
    cast, multiply = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (language.float32, language.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view("uint16"), dst_type.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        a, b = _widened(self, a), _widened(self, b)
        # Each row is a product of its own.
        products = multiply(self, _expanded(a, -2), _expanded(b, -3), _expanded(d, -2), *others)
        products.data = products.data.squeeze(-2)
        return products

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


def _widened(builder: Any, matrix: Any) -> Any:
    is_bfloat16 = matrix.dtype.scalar == language.bfloat16
    return builder.cast_impl(matrix, language.float32) if is_bfloat16 else matrix


def _expanded(matrix: Any, axis: int) -> Any:
    return interpreter.TensorHandle(np.expand_dims(matrix.data, axis), matrix.dtype.scalar)
