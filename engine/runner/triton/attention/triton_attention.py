"""Paged attention in Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, StepInputs
from baton.engine.runner.model.mixers import AttentionPass
from baton.engine.runner.model.pass_layout import PassLayout
from baton.engine.runner.triton.attention.attention_arguments import (
    Batch,
    Cache,
    Partials,
    Scores,
    Sizes,
)
from baton.engine.runner.triton.attention.attention_kernels import (
    attention_kernel,
    merge_kernel,
    segments_kernel,
)
from baton.engine.runner.triton.attention.context_split import (
    NUM_ROWS,
    NUM_SUMS,
    SEGMENT_KEYS,
    ContextSplit,
    count_segments,
    count_tiles,
    round_context,
    split_context,
)
from baton.engine.runner.triton.attention.write_kernels import write_kernel
from baton.engine.runner.triton.launching import count_processors, launch, row_contiguous

MIN_COLUMNS = 16  # of a matrix that tensor cores multiply
MERGED_COLUMNS = 32  # of values, in a program of the merge kernel
# Of large programs with four warps. Without a limit, ptxas spills some to fit one more on a
# processor.
MAX_REGISTERS = 248
UNLIMITED = 1 << 30  # tokens, as a window or a chunk


class AttentionTile(NamedTuple):
    """Sizes of a program of the attention kernels.

    They are the same for prompts and decodes, so that a token has the same bits in both.
    """

    num_heads: int  # of one KV head
    num_keys: int  # read at a time
    num_warps: int
    max_registers: int | None


def attention_tile(head_dim: int, gqa_group_size: int, kv_dtype: torch.dtype) -> AttentionTile:
    """Return the sizes for a model, with which no register is spilled.

    `python -m tools.report_triton_kernels` reports the registers.
    """
    num_warps = 4 if head_dim * kv_dtype.itemsize <= 512 else 8
    is_limited = num_warps == 4 and (kv_dtype.itemsize != 2 or head_dim > 128)
    return AttentionTile(
        num_heads=min(gqa_group_size, NUM_ROWS),
        num_keys=32 if kv_dtype.itemsize == 2 and head_dim <= 256 else 16,
        num_warps=num_warps,
        max_registers=MAX_REGISTERS if is_limited else None,
    )


class TritonPagedAttention:
    """Implements `PagedAttention`. A token's output depends only on its own context."""

    def __init__(
        self, kv: Tensor, layers: Sequence[LayerAttention], num_processors: int | None = None
    ) -> None:
        """`num_processors` is that of the GPU by default."""
        self._kv = kv
        self._layers = tuple(layers)
        self._views = [layer.view(kv) for layer in layers]
        self._num_processors = num_processors or count_processors(kv.device)

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        query_starts = np.append(layout.query_starts, len(layout.positions))
        arrays = [layout.block_tables, query_starts, layout.context_lens]
        if layout.seen_ends is not None:
            arrays.append(layout.seen_ends)
        return TritonPass(
            self._kv,
            self._views,
            self._layers,
            self._num_processors,
            # The width of the tables, in which a graph has room for longer contexts.
            round_context(layout.block_tables.shape[2] * self._kv.shape[4]),
            layout.num_single,
            *[inputs.put(array, np.int32) for array in arrays],
        )


@dataclass(frozen=True, slots=True)
class TritonPass:
    """Implements `AttentionPass`. Arrays of the layout are on the device, in 32 bits."""

    kv: Tensor
    views: Sequence[Tensor]  # keys and values by layer
    layers: tuple[LayerAttention, ...]
    num_processors: int
    max_context: int  # no sequence is longer
    num_single: int  # sequences at the front with one token
    block_tables: Tensor
    query_starts: Tensor  # and, last, the number of tokens
    context_lens: Tensor
    seen_ends: Tensor | None = None  # by token: the end of the keys that it sees, not its own

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Write both with one launch, which quantises them if the cache is int8."""
        own, view, key = self.layers[layer], self.views[layer], row_contiguous(key)
        values = key if value is None else row_contiguous(value)
        num_tokens, num_kv_heads, size = key.shape
        launch(
            write_kernel,
            (num_tokens, num_kv_heads, 1 if value is None else 2),
            self.kv,
            key,
            values,
            *self._sequences(own),
            self.num_single,
            self.block_tables.stride(1),
            *view.stride()[:3],
            self._place(layer, 0),
            *key.stride()[:2],
            *values.stride()[:2],
            size=size,
            padded_size=triton.next_power_of_2(size),
            slot_size=view.shape[4],
            block_size=view.shape[3],
            is_int8=view.dtype is torch.int8,
            num_warps=1,
        )

    def attend(self, layer: int, query: Tensor) -> Tensor:
        own, query = self.layers[layer], query.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        tile = attention_tile(head_dim, num_heads // self.views[layer].shape[2], self.kv.dtype)
        sizes, seen_ends = self._sizes(layer, tile, query), self._seen_ends(own)
        call = _AttentionCall(
            query,
            query if own.sinks is None else own.sinks,
            Batch(
                *self._sequences(own),
                self.block_tables.stride(1),
                self.context_lens if seen_ends is None else seen_ends,
            ),
            self._cache(layer),
            Scores(own.scale, own.softcap or 0.0, own.window or UNLIMITED, own.chunk or UNLIMITED),
            sizes,
            tile,
        )
        limits = (own.window, own.chunk) if seen_ends is None else (None, None)
        split = split_context(
            math.prod(call.grid),
            count_segments(self.max_context, *limits, sizes.tile_tokens),
            num_tokens * num_heads * (sizes.value_dim + NUM_SUMS),
            self.num_processors,
        )
        output = query.new_empty(num_tokens, num_heads, sizes.value_dim)
        if split is None:
            call.attend(output)
        else:
            call.attend_in_parts(output, split)
        return output

    def _seen_ends(self, layer: LayerAttention) -> Tensor | None:
        return self.seen_ends if layer.sees_whole_pictures else None

    def _sequences(self, layer: LayerAttention) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return block table, bounds of the tokens, context lengths and number of sequences."""
        table = self.block_tables[layer.kv_group]
        return table, self.query_starts, self.context_lens, len(self.context_lens)

    def _cache(self, layer: int) -> Cache:
        view, is_latent = self.views[layer], self.layers[layer].value_dim is not None
        places = self._place(layer, 0), self._place(layer, 0 if is_latent else 1)
        return Cache(self.kv, view.stride(0), view.stride(2), *places)

    def _sizes(self, layer: int, tile: AttentionTile, query: Tensor) -> Sizes:
        own, (num_kv_heads, block_size, slot_size) = self.layers[layer], self.views[layer].shape[2:]
        _, num_heads, head_dim = query.shape
        value_dim = own.value_dim or head_dim
        return Sizes(
            num_kv_heads=num_kv_heads,
            gqa_group_size=num_heads // num_kv_heads,
            tile_heads=tile.num_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            slot_size=slot_size,
            block_size=block_size,
            padded_value_dim=_padded(value_dim),
            padded_rest_dim=_padded(head_dim - value_dim),
            num_rows=NUM_ROWS,
            num_keys=tile.num_keys,
            segment_keys=SEGMENT_KEYS,
            has_softcap=own.softcap is not None,
            has_sinks=own.sinks is not None,
            is_int8=self.kv.dtype is torch.int8,
            is_latent=own.value_dim is not None,
            has_seen_ends=self._seen_ends(own) is not None,
        )

    def _place(self, layer: int, tensor: int) -> int:
        """Return the index of the layer's keys (0) or values (1) in a block."""
        view = self.views[layer]
        return int(view.storage_offset() - self.kv.storage_offset()) + tensor * view.stride(1)


class _AttentionCall(NamedTuple):
    """Arguments of the kernels for one layer."""

    queries: Tensor
    sinks: Tensor
    batch: Batch
    cache: Cache
    scores: Scores
    sizes: Sizes
    tile: AttentionTile

    @property
    def grid(self) -> tuple[int, int]:
        """Return the numbers of tiles of a KV head, and of heads and their tiles."""
        sizes = self.sizes
        num_tiles = count_tiles(len(self.queries), self.batch.num_sequences, sizes.tile_tokens)
        return num_tiles, sizes.num_kv_heads * sizes.head_tiles

    def attend(self, output: Tensor) -> None:
        launch(
            attention_kernel,
            self.grid,
            output,
            self.queries,
            self.sinks,
            *self.batch,
            self.cache,
            self.scores,
            sizes=self.sizes,
            **self._options,
        )

    def attend_in_parts(self, output: Tensor, split: ContextSplit) -> None:
        partials = self._empty_partials(split.num_segments)
        launch(
            segments_kernel,
            (*self.grid, split.num_programs),
            self.queries,
            partials,
            *split,
            *self.batch,
            self.cache,
            self.scores,
            sizes=self.sizes,
            **self._options,
        )
        launch(
            merge_kernel,
            (*self.grid, triton.cdiv(self.sizes.value_dim, MERGED_COLUMNS)),
            output,
            self.sinks,
            partials,
            split.num_segments,
            *self.batch,
            self.scores,
            num_columns=MERGED_COLUMNS,
            sizes=self.sizes,
            num_warps=2,
        )

    @property
    def _options(self) -> dict[str, int]:
        options = {"num_warps": self.tile.num_warps}
        if self.tile.max_registers is not None and torch.version.hip is None:
            options["maxnreg"] = self.tile.max_registers
        return options

    def _empty_partials(self, num_segments: int) -> Partials:
        rows, dtype = (*self.queries.shape[:2], num_segments), torch.float32
        return Partials(
            self.queries.new_empty((*rows, self.sizes.value_dim), dtype=dtype),
            self.queries.new_empty((*rows, NUM_SUMS), dtype=dtype),
        )


def _padded(size: int) -> int:
    """Return the width of a matrix with so many columns, or 0 without any."""
    return max(MIN_COLUMNS, triton.next_power_of_2(size)) if size else 0
