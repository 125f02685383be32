"""Native paged attention for bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.runner.attention.paged_attention import AttentionPass, LayerAttention
from engine.runner.kernels.abi import (
    AttentionArgs,
    AttentionParams,
    BatchLayout,
    PagedKv,
    WriteKvArgs,
)
from engine.runner.kernels.native import Kernels, address
from engine.runner.layout import PassLayout


class NativePagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(self, kernels: Kernels, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._kernels = kernels
        self._kv = kv
        value_dim = layers[0].value_dim or kv.shape[-1]
        self._paged_kv = PagedKv(kv.data_ptr(), *kv.shape[1:], value_dim)
        self._layers = tuple(layers)  # keep the sinks alive
        self._params = (AttentionParams * len(layers))(*map(_params, layers))

    def begin(self, layout: PassLayout) -> AttentionPass:
        return NativePass(self._kernels, self._paged_kv, self._params, layout)


def _params(layer: LayerAttention) -> AttentionParams:
    return AttentionParams(
        sinks=address(layer.sinks),
        window=layer.window or 0,
        chunk=layer.chunk or 0,
        scale=layer.scale,
        softcap=layer.softcap or 0.0,
    )


class NativePass:
    """Implements `AttentionPass`."""

    def __init__(
        self,
        kernels: Kernels,
        kv: PagedKv,
        params: ctypes.Array[AttentionParams],
        layout: PassLayout,
    ) -> None:
        self._kernels = kernels
        arrays = {
            "write_blocks": layout.write_blocks,
            "write_offsets": layout.write_offsets,
            "block_tables": layout.block_tables,
            "context_lens": layout.context_lens,
            "query_starts": layout.query_starts,
            "num_queries": layout.num_queries,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._arrays = arrays  # own the memory that `batch` points to
        self.kv = kv
        self.params = params  # by layer
        self.batch = BatchLayout(
            **{name: array.ctypes.data for name, array in arrays.items()},
            table_stride=layout.block_tables.shape[1],
            num_sequences=len(layout.context_lens),
            num_single=layout.num_single,
            num_tokens=len(layout.write_blocks),
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        query = query.contiguous()
        num_tokens, num_heads, _ = query.shape
        output = torch.empty(num_tokens, num_heads, self.kv.value_dim, dtype=query.dtype)
        self._kernels.library.baton_attention(
            AttentionArgs(
                kv=self.kv,
                batch=self.batch,
                params=self.params[layer],
                queries=query.data_ptr(),
                dst=output.data_ptr(),
                layer=layer,
                num_heads=num_heads,
                num_threads=self._kernels.num_threads,
            )
        )
        return output

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        inner = (key.shape[2], 1)
        key = key if key.stride()[1:] == inner else key.contiguous()
        value = key if value is None else value
        value = value if value.stride()[1:] == inner else value.contiguous()
        self._kernels.library.baton_write_kv(
            WriteKvArgs(
                kv=self.kv,
                batch=self.batch,
                keys=key.data_ptr(),
                values=value.data_ptr(),
                layer=layer,
                key_stride=key.stride(0),
                value_stride=value.stride(0),
                num_threads=self._kernels.num_threads,
            )
        )
