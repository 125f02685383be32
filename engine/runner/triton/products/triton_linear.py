"""Linear layers of quantized matrices in Triton, and the packing of matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.model.linear import Linear, TorchLinear
from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.products.matrix_layout import (
    Kind,
    MatrixLayout,
    dtype_of,
    layout_of,
    pack,
)
from baton.engine.runner.triton.products.product_kernels import linear_kernel, rows_kernel
from baton.engine.runner.weights.packed_weight import PackedWeight

MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # from weight and bias

NUM_STAGES = 3  # steps that a program loads ahead


class ProductTile(NamedTuple):
    """Sizes of a program of the product kernels. A token's bits do not depend on them."""

    num_tokens: int
    num_rows: int


# Tensor cores multiply tiles of 64 tokens by other instructions than smaller ones.
FEW_TOKENS = ProductTile(16, 32)
MANY_TOKENS = ProductTile(32, 64)


def product_tile(num_tokens: float, dtype: torch.dtype) -> ProductTile:
    """Return the tile for that many tokens of a matrix. Large ones of float32 spill registers."""
    is_large = num_tokens > FEW_TOKENS.num_tokens and dtype.itemsize == 2
    return MANY_TOKENS if is_large else FEW_TOKENS


def multiply_rows(
    hidden_states: Tensor,
    matrix: Tensor,
    layout: MatrixLayout,
    bias: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    """[tokens, columns] → [tokens, rows]. `order` permutes the activations."""
    src = row_contiguous(hidden_states)
    num_tokens, num_rows = len(src), layout.num_rows
    dst = src.new_empty(num_tokens, num_rows)
    tile = product_tile(num_tokens, src.dtype)
    launch(
        linear_kernel,
        (triton.cdiv(num_tokens, tile.num_tokens), triton.cdiv(num_rows, tile.num_rows)),
        dst,
        src,
        matrix,
        dst if bias is None else bias,
        dst if order is None else order,
        num_tokens,
        src.stride(0),
        matrix=layout,
        tile_tokens=tile.num_tokens,
        tile_rows=tile.num_rows,
        has_bias=bias is not None,
        has_order=order is not None,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    return dst


@dataclass(frozen=True, slots=True)
class TritonLinear:
    """Implements `Linear` with a packed matrix of 4 or 8 bits."""

    layout: MatrixLayout
    packed: Tensor
    dtype: torch.dtype  # of dequantized rows
    bias: Tensor | None
    column_order: Tensor | None  # int32: permutes the activations

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return multiply_rows(hidden_states, self.packed, self.layout, self.bias, self.column_order)

    def rows(self, row_ids: Tensor) -> Tensor:
        row_ids = row_ids.contiguous()
        num_columns = self.layout.num_columns
        dst = torch.empty(len(row_ids), num_columns, dtype=self.dtype, device=row_ids.device)
        launch(
            rows_kernel,
            (len(row_ids), self.layout.num_pieces),
            dst,
            row_ids,
            self.packed,
            dst if self.column_order is None else self.column_order,
            matrix=self.layout,
            has_order=self.column_order is not None,
            num_warps=1,
        )
        return dst


class TritonPacker:
    """Implements `Packer` for matrices on a device."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, make_plain: MakeLinear = TorchLinear
    ) -> None:
        """`make_plain` makes the linear layers of matrices that are not quantized."""
        self._dtype = dtype
        self._device = device
        self._make_plain = make_plain

    @property
    def layout(self) -> str:
        """Return the dtype, to which plain matrices are rounded. Others differ with the sources."""
        return f"triton {self._dtype}"

    def pack(self, weight: Tensor | Quantized) -> PackedWeight:
        return pack(weight)

    def packed_linear(self, packed: PackedWeight, bias: Tensor | None) -> Linear:
        """Copy the matrix to the device, unless it is there."""
        return make_linear(packed, bias, self._device, self._make_plain)


def make_linear(
    packed: PackedWeight,
    bias: Tensor | None,
    device: torch.device,
    make_plain: MakeLinear = TorchLinear,
) -> Linear:
    data, dtype, layout = packed.data.to(device), dtype_of(packed.fields), layout_of(packed.fields)
    if layout.kind == Kind.PLAIN.value:
        return make_plain(data.view(dtype).view(layout.num_rows, layout.num_columns), bias)
    order = packed.column_order
    if order is not None:
        order = order.to(device, torch.int32)
    return TritonLinear(layout, data, dtype, bias, order)
