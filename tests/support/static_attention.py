"""Paged attention in torch whose launches depend only on the numbers of rows and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.runner.attention.paged_attention import LayerAttention, TorchPagedAttention
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.mixers import AttentionPass
from baton.engine.runner.model.pass_layout import PassLayout


class StaticPagedAttention:
    """Implements `PagedAttention` for single tokens. Other passes are those of the reference.

    Supports no windows, chunks, soft-caps and sinks.
    """

    def __init__(self, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._kv = kv
        self._layers = layers
        self._others = TorchPagedAttention(kv, layers)

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        if layout.num_single < len(layout.num_queries):
            return self._others.begin(layout, inputs)
        return _Pass(
            self._kv,
            self._layers,
            inputs.put(layout.block_tables),
            inputs.put(layout.context_lens),
            inputs.put(layout.write_blocks),
            inputs.put(layout.write_offsets),
        )


@dataclass(frozen=True, slots=True)
class _Pass:
    kv: Tensor
    layers: Sequence[LayerAttention]
    block_tables: Tensor
    context_lens: Tensor
    write_blocks: Tensor
    write_offsets: Tensor

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        own = self.layers[layer]
        for tensor, numbers in enumerate((key, value)):
            assert numbers is not None
            blocks = self.write_blocks[own.kv_group]
            self.kv[blocks, own.index_in_block, tensor, :, self.write_offsets] = numbers

    def attend(self, layer: int, query: Tensor) -> Tensor:
        own = self.layers[layer]
        table = self.block_tables[own.kv_group]
        blocks = self.kv[:, own.index_in_block].index_select(0, table.flatten())
        # Keys and values are [rows, kv_heads, slots, head_dim].
        by_row = blocks.view(*table.shape, *blocks.shape[1:]).permute(2, 0, 3, 1, 4, 5)
        keys, values = by_row.flatten(3, 4).unbind()
        slots = torch.arange(keys.shape[2], device=keys.device)
        is_hidden = slots >= self.context_lens[:, None]
        mask = torch.zeros(is_hidden.shape, device=keys.device).masked_fill(is_hidden, -1e30)
        values = values.masked_fill(is_hidden[:, None, :, None], 0.0)
        grouped = query.unflatten(1, (keys.shape[1], -1))
        attended = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask[:, None, None, :], scale=own.scale
        )
        return attended.flatten(1, 2)
