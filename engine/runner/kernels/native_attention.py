"""Native paged attention for bfloat16 on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.runner.attention.byte_kv import scale_bytes
from baton.engine.runner.attention.paged_attention import LayerAttention, scales_by_place
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.kernels.abi import AttentionParams, BatchLayout, PagedKv, Struct
from baton.engine.runner.kernels.calls import Kernels, PassArrays
from baton.engine.runner.model.mixers import AttentionPass
from baton.engine.runner.model.pass_layout import PassLayout

Params = ctypes.Array[Struct]  # AttentionParams of a KV group's layers, by index in block
UNIT_BYTES = 2  # of strides


def paged_kv(
    kv: Tensor,
    layer: Tensor,
    value_dim: int | None = None,
    first_head: int = 0,
    scales: Tensor | None = None,
) -> Struct:
    """Return the description of a KV tensor for the layers with the shape of `layer`, a view.

    `first_head` is that of the view among the heads of the layer.
    """
    num_tensors, num_kv_heads, block_size, slot_size = layer.shape[1:]
    head_dim, unit = slot_size - scale_bytes(kv.dtype), UNIT_BYTES // kv.element_size()
    return PagedKv(
        blocks=kv.data_ptr() + first_head * layer.stride(2) * kv.element_size(),
        scales=None if scales is None else scales.data_ptr(),
        block_stride=kv.stride(0) // unit,
        place_stride=kv.stride(1) // unit,
        tensor_stride=layer.stride(1) // unit,
        num_tensors=num_tensors,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        is_int8=kv.dtype is torch.int8,
    )


class NativePagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(self, kernels: Kernels, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self.kernels = kernels
        self._tensor = kv
        self.layers = tuple(layers)  # keep the sinks alive
        num_groups = 1 + max(layer.kv_group for layer in layers)
        self.params = [_params_of_group(layers, group) for group in range(num_groups)]
        self._scales: dict[int, Tensor] = {}  # of FP8, by KV group
        self.kv = [self._paged_kv(group) for group in range(num_groups)]

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        return NativePass(self, layout)

    def _paged_kv(self, group: int) -> Struct:
        kv, own = self._tensor, [layer for layer in self.layers if layer.kv_group == group]
        layer, view = own[0], own[0].view(kv)
        if kv.dtype is torch.float8_e4m3fn:
            self._scales[group] = scales_by_place(own, kv.shape[1], *view.shape[1:3])
        first_head, scales = layer.own_heads.start, self._scales.get(group)
        return paged_kv(kv, view, layer.value_dim, first_head, scales)


def _params_of_group(layers: Sequence[LayerAttention], group: int) -> Params:
    own = [layer for layer in layers if layer.kv_group == group]
    params = (AttentionParams * (1 + max(layer.index_in_block for layer in own)))()
    for layer in own:
        params[layer.index_in_block] = AttentionParams(
            sinks=None if layer.sinks is None else layer.sinks.data_ptr(),
            window=layer.window or 0,
            chunk=layer.chunk or 0,
            scale=layer.scale,
            softcap=layer.softcap or 0.0,
            is_causal=not layer.sees_whole_pictures,
        )
    return params


class NativePass:
    """Implements `AttentionPass`."""

    def __init__(self, attention: NativePagedAttention, layout: PassLayout) -> None:
        self.attention = attention
        self._arrays = arrays = PassArrays()
        shared = {
            "write_offsets": arrays.address(layout.write_offsets),
            "context_lens": arrays.address(layout.context_lens),
            "query_starts": arrays.address(layout.query_starts),
            "num_queries": arrays.address(layout.num_queries),
            "table_stride": layout.block_tables.shape[2],
            "num_sequences": len(layout.context_lens),
            "num_single": layout.num_single,
            "num_tokens": len(layout.positions),
        }
        if layout.seen_ends is not None:
            shared["seen_ends"] = arrays.address(layout.seen_ends)
        tables = zip(layout.block_tables, layout.write_blocks, strict=True)
        self.batches = [  # by KV group
            BatchLayout(
                block_tables=arrays.address(block_table),
                write_blocks=arrays.address(write_blocks),
                **shared,
            )
            for block_table, write_blocks in tables
        ]

    def attend(self, layer: int, query: Tensor) -> Tensor:
        query = query.contiguous()
        num_tokens, num_heads, _ = query.shape
        own = self.attention.layers[layer]
        kv = self.attention.kv[own.kv_group]
        output = torch.empty(num_tokens, num_heads, kv.value_dim, dtype=query.dtype)
        self.attention.kernels.call(
            "baton_attention",
            kv=kv,
            batch=self.batches[own.kv_group],
            params=self.attention.params[own.kv_group][own.index_in_block],
            queries=query,
            dst=output,
            layer=own.index_in_block,
            num_heads=num_heads,
        )
        return output

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        inner = (key.shape[2], 1)
        key = key if key.stride()[1:] == inner else key.contiguous()
        value = key if value is None else value
        value = value if value.stride()[1:] == inner else value.contiguous()
        own = self.attention.layers[layer]
        self.attention.kernels.call(
            "baton_write_kv",
            kv=self.attention.kv[own.kv_group],
            batch=self.batches[own.kv_group],
            keys=key,
            values=value,
            layer=own.index_in_block,
            key_stride=key.stride(0),
            value_stride=value.stride(0),
        )
