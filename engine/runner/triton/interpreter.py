"""Corrections of Triton's interpreter, which runs kernels on a CPU to test them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from triton import language
from triton.runtime import interpreter


@cache
def correct_interpreter() -> None:
    """Make the interpreter compute as GPUs do.

    That of Triton 3.9 truncates to bfloat16 instead of rounding to the nearest number, reads
    subnormal ones wrongly, and multiplies their bits in matrices as integers. Products in float32
    are those of numpy, whose bits depend on the sizes of the matrices and on a row's place; rounded
    from float64, they do not.
    """
    builder = interpreter.InterpreterBuilder
    cast, multiply = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        dtypes = src.dtype.scalar, dst_type.scalar
        if dtypes == (language.bfloat16, language.float32):
            wide = (src.data.astype("uint32") << 16).view("float32")
            return interpreter.TensorHandle(wide, dst_type.scalar)
        if dtypes != (language.float32, language.bfloat16):
            return cast(self, src, dst_type)
        rounded = torch.tensor(src.data).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view("uint16"), dst_type.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *others: Any) -> Any:
        wide = interpreter.TensorHandle(d.data.astype("float64"), language.float64)
        products = multiply(self, _widened(self, a), _widened(self, b), wide, *others)
        return interpreter.TensorHandle(products.data.astype(d.data.dtype), d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot


@cache
def speed_up_calls() -> None:
    """Spare a third of the time: each call of a function in a kernel replaces Triton's language.

    The launch of the kernel has replaced it already, and restores it.
    """
    call = interpreter.InterpretedFunction.__call__

    def call_replaced(self: Any, *args: Any, **named: Any) -> Any:
        is_replaced = not language.core.is_builtin(language.load)
        if is_replaced and self.fn.__globals__.get("tl") is language:
            return self.rewrite()(*args, **named)
        return call(self, *args, **named)

    interpreter.InterpretedFunction.__call__ = call_replaced


def _widened(builder: Any, matrix: Any) -> Any:
    is_bfloat16 = matrix.dtype.scalar == language.bfloat16
    return builder.cast_impl(matrix, language.float32) if is_bfloat16 else matrix
