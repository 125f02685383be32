"""Paged attention in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from baton.engine.runner.attention.int8_kv import quantize
from baton.engine.runner.attention.paged_attention import AttentionPass, LayerAttention
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.layout import PassLayout
from baton.engine.runner.triton.attention_kernels import attention_kernel, write_kernel
from baton.engine.runner.triton.launching import launch, row_contiguous

NUM_ROWS = 16  # of a tile, tokens times query heads: the fewest that tensor cores multiply
# Of int8 KV. Without a limit, ptxas spills some to fit one more program on a processor.
MAX_REGISTERS = 248
UNLIMITED = 1 << 30  # tokens, as a window or a chunk


class AttentionTile(NamedTuple):
    """Sizes of a program of the attention kernel.

    They are the same for prompts and decodes, so that a token has the same bits in both.
    """

    num_heads: int  # of one KV head
    num_keys: int  # read at a time
    max_registers: int | None

    @property
    def num_tokens(self) -> int:
        return NUM_ROWS // self.num_heads


def attention_tile(head_dim: int, gqa_group_size: int, kv_dtype: torch.dtype) -> AttentionTile:
    """Return the sizes for a model, with which no register is spilled.

    `python -m tools.report_triton_kernels` reports the registers.
    """
    return AttentionTile(
        num_heads=min(gqa_group_size, NUM_ROWS),
        num_keys=32 if kv_dtype.itemsize == 2 and head_dim <= 256 else 16,
        max_registers=MAX_REGISTERS if kv_dtype is torch.int8 else None,
    )


class TritonPagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(self, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._kv = kv
        self._layers = tuple(layers)

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        num_tokens = len(layout.positions)
        query_starts = np.append(layout.query_starts, num_tokens)
        arrays = [
            layout.block_tables,
            query_starts,
            layout.context_lens,
            layout.write_blocks,
            layout.write_offsets,
        ]
        tensors = [inputs.put(array) for array in arrays]
        return TritonPass(self._kv, self._layers, *tensors)


@dataclass(frozen=True, slots=True)
class TritonPass:
    """Implements `AttentionPass`. Arrays of the layout are on the device."""

    kv: Tensor
    layers: tuple[LayerAttention, ...]
    block_tables: Tensor
    query_starts: Tensor  # and, last, the number of tokens
    context_lens: Tensor
    write_blocks: Tensor
    write_offsets: Tensor

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        self._write(layer, 0, key)
        if value is not None:
            self._write(layer, 1, value)

    def _write(self, layer: int, tensor: int, numbers: Tensor) -> None:
        own = self.layers[layer]
        slots = quantize(numbers) if self.kv.dtype is torch.int8 else row_contiguous(numbers)
        num_tokens, num_kv_heads, slot_size = slots.shape
        launch(
            write_kernel,
            (num_tokens, num_kv_heads),
            self.kv,
            slots,
            row_contiguous(self.write_blocks[own.kv_group]),
            self.write_offsets,
            self.kv.stride(0),
            self.kv.stride(3),
            self._place(own, tensor),
            *slots.stride()[:2],
            slot_size=slot_size,
            padded_size=triton.next_power_of_2(slot_size),
            num_warps=1,
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        own, query = self.layers[layer], query.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, num_sequences = self.kv.shape[3], len(self.context_lens)
        gqa_group_size = num_heads // num_kv_heads
        tile = attention_tile(head_dim, gqa_group_size, self.kv.dtype)
        head_tiles = triton.cdiv(gqa_group_size, tile.num_heads)
        table = row_contiguous(self.block_tables[own.kv_group])
        output = query.new_empty(num_tokens, num_heads, own.value_dim or head_dim)
        launch(
            attention_kernel,
            (num_tokens // tile.num_tokens + num_sequences, num_kv_heads * head_tiles),
            output,
            query,
            self.kv,
            query if own.sinks is None else own.sinks,
            table,
            self.query_starts,
            self.context_lens,
            num_sequences,
            table.stride(0),
            num_heads,
            self.kv.stride(0),
            self.kv.stride(3),
            self._place(own, 0),
            self._place(own, 0 if own.value_dim is not None else 1),
            own.scale,
            own.softcap or 0.0,
            own.window or UNLIMITED,
            own.chunk or UNLIMITED,
            gqa_group_size=gqa_group_size,
            has_softcap=own.softcap is not None,
            has_sinks=own.sinks is not None,
            is_int8=self.kv.dtype is torch.int8,
            num_warps=4,
            **self._sizes(tile, head_dim, own.value_dim or head_dim),
        )
        return output

    def _sizes(self, tile: AttentionTile, head_dim: int, value_dim: int) -> dict[str, int | None]:
        """Return the constants of the kernel that are sizes."""
        block_size, slot_size = self.kv.shape[4:]
        return {
            "tile_heads": tile.num_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "slot_size": slot_size,
            "block_size": block_size,
            "padded_dim": max(NUM_ROWS, triton.next_power_of_2(head_dim)),
            "padded_value_dim": max(NUM_ROWS, triton.next_power_of_2(value_dim)),
            "num_rows": NUM_ROWS,
            "num_keys": tile.num_keys,
            "maxnreg": tile.max_registers,
        }

    def _place(self, layer: LayerAttention, tensor: int) -> int:
        """Return the index of the layer's keys (0) or values (1) in a block."""
        return layer.index_in_block * self.kv.stride(1) + tensor * self.kv.stride(2)
