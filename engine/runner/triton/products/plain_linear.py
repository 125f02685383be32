"""Products with plain matrices in Triton: a token's bits do not depend on the other tokens."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.products.head_kernels import heads_kernel
from baton.engine.runner.triton.products.matrix_layout import plain_layout
from baton.engine.runner.triton.products.triton_linear import (
    NUM_STAGES,
    multiply_rows,
    product_tile,
)


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """Implements `Linear`. The weight is contiguous."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, hidden_states: Tensor) -> Tensor:
        layout = plain_layout(*self.weight.shape)
        return multiply_rows(hidden_states, self.weight, layout, self.bias, None)

    def rows(self, row_ids: Tensor) -> Tensor:
        return functional.embedding(row_ids, self.weight)


@dataclass(frozen=True, slots=True)
class PlainHeadLinears:
    """Implements `HeadLinears`. The weights are contiguous."""

    weights: Tensor  # [heads, rows, columns]

    def __call__(self, heads: Tensor) -> Tensor:
        src, layout = row_contiguous(heads), plain_layout(*self.weights.shape[1:])
        num_tokens, num_heads, num_rows = len(src), len(self.weights), layout.num_rows
        dst = src.new_empty(num_tokens, num_heads, num_rows)
        tile = product_tile(num_tokens, src.dtype)
        row_tiles = triton.cdiv(num_rows, tile.num_rows)
        launch(
            heads_kernel,
            (triton.cdiv(num_tokens, tile.num_tokens), row_tiles, num_heads),
            dst,
            src,
            self.weights,
            num_tokens,
            *src.stride()[:2],
            matrix=layout,
            tile_tokens=tile.num_tokens,
            tile_rows=tile.num_rows,
            num_warps=4,
            num_stages=NUM_STAGES,
        )
        return dst
