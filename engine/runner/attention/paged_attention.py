"""Paged attention: the Protocol of its kernels and the plain torch reference."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.kv_cache.groups import KvHeads
from baton.engine.runner.attention.byte_kv import dequantize, quantize
from baton.engine.runner.attention.kv_tensor import view_layer
from baton.engine.runner.device.step_inputs import SHARED_INPUTS, Array, StepInputs
from baton.engine.runner.model.mixers import AttentionPass
from baton.engine.runner.model.pass_layout import Ints, PassLayout


class PagedAttention(Protocol):
    """Attention over one KV tensor. Nothing else reads or writes the tensor by layer."""

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        """Put the arrays of a pass. It reads their tensors only after `inputs` are sent."""
        ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Attention of one layer, and where its keys and values are."""

    scale: float  # multiplies the scores
    window: int | None = None  # tokens that are seen, the token itself included
    chunk: int | None = None  # tokens see only their own chunk of this size
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads] in float32: logits of a slot without a value
    kv_group: int = 0  # whose block table the layer uses
    index_in_block: int = 0  # among the layers that a block holds
    value_dim: int | None = None  # leading numbers of a key that are its value; None: stored apart
    kv_heads: KvHeads | None = None  # if the model has layers of unlike sizes
    own_heads: range = range(0)  # of keys and values, if others compute the others; empty: all
    # Scales of FP8 keys and values, [tensors, kv_heads] in float32, of all heads. None: 1.
    kv_scales: Tensor | None = None
    sees_whole_pictures: bool = True  # tokens attend to what `seen_ends` has, not up to themselves

    def view(self, kv: Tensor) -> Tensor:
        """Return the keys and values, [blocks, tensors, kv_heads, block_size, slot]."""
        return self._own(view_layer(kv, self.index_in_block, self.kv_heads), 2)

    @property
    def own_scales(self) -> Tensor | None:
        """Return the scales of FP8 of the layer's own heads."""
        return None if self.kv_scales is None else self._own(self.kv_scales, 1)

    def _own(self, all_heads: Tensor, dim: int) -> Tensor:
        heads = self.own_heads
        return all_heads.narrow(dim, heads.start, len(heads)) if heads else all_heads


def scales_by_place(layers: Iterable[LayerAttention], *shape: int) -> Tensor:
    """Return the scales of FP8 keys and values of a KV group, [places, tensors, kv_heads]."""
    scales = torch.ones(shape)
    for layer in layers:
        own = layer.own_scales
        if own is not None:
            scales[layer.index_in_block] = own
    return scales


class TorchPagedAttention:
    """Reference implementation: gathers each sequence's blocks and calls torch's attention."""

    def __init__(self, kv: Tensor, layers: Sequence[LayerAttention]) -> None:
        self._kv = kv
        self._layers = tuple(layers)
        self._views = [layer.view(kv) for layer in layers]

    def begin(self, layout: PassLayout, inputs: StepInputs = SHARED_INPUTS) -> AttentionPass:
        ranges = [_range_of(layer) for layer in self._layers]
        planned = {
            each: [
                (group, [inputs.put(array) for array in group.arrays])
                for group in _plan_groups(layout, each, self._kv.shape[4])
            ]
            for each in set(ranges)
        }
        writes = inputs.put(layout.write_blocks), inputs.put(layout.write_offsets)
        return _TorchPass(self._views, self._layers, ranges, planned, *writes)


class _Range(NamedTuple):
    """Tokens that layers attend to, and the block table in which they find them."""

    kv_group: int
    window: int | None
    chunk: int | None
    sees_whole_pictures: bool


def _range_of(layer: LayerAttention) -> _Range:
    return _Range(layer.kv_group, layer.window, layer.chunk, layer.sees_whole_pictures)


class _PlannedGroup(NamedTuple):
    """Sequences with the same number of tokens, padded to the same number of blocks.

    The arrays are those of the host: a block table, [sequences, blocks]; flat indices into it
    of blocks with slots past the context; a mask of those slots, [padded blocks, block_size];
    positions in the sequence of queries and slots, each [sequences, any]; and the ends of what the
    queries see, if that is not up to themselves.
    """

    tokens: slice
    num_queries: int  # per sequence: 1, or any number for a group of one sequence
    is_causal: bool  # torch's causal mask does: the tokens are a prompt from its beginning
    arrays: Sequence[Array]


class _Group(NamedTuple):
    """A group on the device."""

    tokens: slice
    num_queries: int
    block_table: Tensor
    padded_blocks: Tensor
    padding: Tensor  # [padded blocks, block_size, 1]
    mask: Tensor | None  # [1, sequences, queries, slots], added to scores; None means causal


def _place_group(
    group: _PlannedGroup, attended: _Range, tensors: Sequence[Tensor], dtype: torch.dtype
) -> _Group:
    """Take the tensors of the group's arrays, and build its mask for queries of this dtype."""
    block_table, padded_blocks, padding, queries, slots, *ends = tensors
    mask = None
    if not group.is_causal:
        query, slot = queries[None, :, :, None], slots[None, :, None, :]
        hidden = slot >= ends[0][None, :, :, None] if ends else slot > query
        if attended.window is not None:
            hidden = hidden | (slot <= query - attended.window)
        if attended.chunk is not None:
            hidden = hidden | (slot < query // attended.chunk * attended.chunk)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, float("-inf"))
    padding = padding[:, :, None]
    return _Group(group.tokens, group.num_queries, block_table, padded_blocks, padding, mask)


@dataclass(frozen=True, slots=True)
class _TorchPass:
    views: Sequence[Tensor]  # keys and values by layer
    layers: tuple[LayerAttention, ...]
    ranges: Sequence[_Range]  # by layer
    planned: Mapping[_Range, Sequence[tuple[_PlannedGroup, Sequence[Tensor]]]]
    write_blocks: Tensor
    write_offsets: Tensor
    _placed: dict[_Range, list[_Group]] = field(default_factory=dict)

    def write(self, layer: int, key: Tensor, value: Tensor | None) -> None:
        self._write(layer, 0, key)
        if value is not None:
            self._write(layer, 1, value)

    def _write(self, layer: int, tensor: int, numbers: Tensor) -> None:
        own = self.layers[layer]
        blocks = self.write_blocks[own.kv_group]
        view, scales = self.views[layer], own.own_scales
        scales = None if scales is None else scales[tensor, :, None]
        view[blocks, tensor, :, self.write_offsets] = quantize(numbers, view.dtype, scales)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        output = query.new_empty(*query.shape[:2], self.layers[layer].value_dim or query.shape[2])
        for group in self._groups(self.ranges[layer], query.dtype):
            keys, values = self._gather(layer, group, query.dtype)
            attend = _attend_decodes if group.num_queries == 1 else _attend_chunk
            output[group.tokens] = attend(
                query[group.tokens], keys, values, group.mask, self.layers[layer]
            )
        return output

    def _groups(self, attended: _Range, dtype: torch.dtype) -> list[_Group]:
        """Return the groups of a range. They are placed when the first layer attends."""
        if attended not in self._placed:
            self._placed[attended] = [
                _place_group(group, attended, tensors, dtype)
                for group, tensors in self.planned[attended]
            ]
        return self._placed[attended]

    def _gather(self, layer: int, group: _Group, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the group's keys and values, each [kv_heads, sequences, slots, size]."""
        num_sequences, num_blocks = group.block_table.shape
        by_head = self.views[layer].permute(1, 2, 0, 3, 4)
        blocks = by_head.index_select(2, group.block_table.flatten())
        scales = self.layers[layer].own_scales
        scales = None if scales is None else scales[..., None, None, None]
        blocks = dequantize(blocks, dtype, scales)
        num_tensors, num_kv_heads, _, block_size, head_dim = blocks.shape
        if group.padded_blocks.numel():
            # Zero the padding: zero times NaN is NaN, so a weight of zero does not hide a NaN.
            cleaned = blocks[:, :, group.padded_blocks].masked_fill(group.padding, 0.0)
            blocks[:, :, group.padded_blocks] = cleaned
        num_slots = num_blocks * block_size
        slots = blocks.view(num_tensors, num_kv_heads, num_sequences, num_slots, head_dim)
        return slots[0], slots[-1, ..., : self.layers[layer].value_dim]


def _attend_decodes(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: LayerAttention
) -> Tensor:
    """Attend for one token of each sequence; the heads of a KV head form the query dimension."""
    num_kv_heads, num_sequences, _, head_dim = keys.shape
    grouped = query.view(num_sequences, num_kv_heads, -1, head_dim).transpose(0, 1)
    sinks = None if layer.sinks is None else layer.sinks.view(num_kv_heads, 1, -1, 1)
    output = _attend(grouped, keys, values, mask, layer, sinks)
    return output.transpose(0, 1).reshape(*query.shape[:2], -1)


def _attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: LayerAttention
) -> Tensor:
    """Attend for many tokens of one sequence; the heads of a KV head form a dimension."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[0]
    gqa_group_size = num_heads // num_kv_heads
    output = _attend(
        query.view(num_tokens, num_kv_heads, gqa_group_size, head_dim).permute(1, 2, 0, 3),
        keys.expand(-1, gqa_group_size, -1, -1),
        values.expand(-1, gqa_group_size, -1, -1),
        mask,
        layer,
        None if layer.sinks is None else layer.sinks.view(num_kv_heads, gqa_group_size, 1, 1),
    )
    return output.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, -1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    layer: LayerAttention,
    sinks: Tensor | None,
) -> Tensor:
    """Attend over [.., queries, head_dim]. Without a mask, attention is causal."""
    if layer.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=layer.scale
        )
    scores = query.float() @ keys.float().transpose(-1, -2) * layer.scale
    if layer.softcap is not None:
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
    if mask is None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    else:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


def _plan_groups(layout: PassLayout, attended: _Range, block_size: int) -> list[_PlannedGroup]:
    num_single = layout.num_single
    singles = _runs_of_similar_length(layout.context_lens[:num_single], block_size)
    chunks = [(row, row + 1) for row in range(num_single, len(layout.num_queries))]
    return [
        _plan_group(layout, np.arange(first, end), attended, block_size)
        for first, end in (*singles, *chunks)
    ]


def _runs_of_similar_length(context_lens: Ints, block_size: int) -> list[tuple[int, int]]:
    """Split neighbours into runs, (first, end), of which padding is at most about half."""
    if not len(context_lens):
        return []
    sizes = np.frexp((context_lens - 1) // block_size + 1)[1]
    cuts = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return list(itertools.pairwise(cuts))


def _plan_group(layout: PassLayout, rows: Ints, attended: _Range, block_size: int) -> _PlannedGroup:
    window, chunk = attended.window, attended.chunk
    first_token, num_queries = (
        int(each[rows[0]]) for each in (layout.query_starts, layout.num_queries)
    )
    lens = layout.context_lens[rows]
    first_query = lens - num_queries
    first_seen = np.zeros_like(lens)
    if window is not None:
        first_seen = np.maximum(first_query - window + 1, 0)
    if chunk is not None:
        first_seen = np.maximum(first_seen, first_query // chunk * chunk)
    first_block = first_seen // block_size
    num_blocks = int((((lens - 1) // block_size) - first_block).max()) + 1
    columns = first_block[:, None] + np.arange(num_blocks)
    # An entry past the context repeats the last block: any block would do, its slots are padding.
    columns = np.minimum(columns, ((lens - 1) // block_size)[:, None])
    table = layout.block_tables[attended.kv_group][rows[:, None], columns]
    slots = (first_block * block_size)[:, None] + np.arange(num_blocks * block_size)
    padding = (slots >= lens[:, None]).reshape(-1, block_size)
    padded_blocks = np.flatnonzero(padding.any(axis=1))
    queries = first_query[:, None] + np.arange(num_queries)
    is_whole_prompt = num_queries > 1 and queries[0, 0] == 0 and slots[0, 0] == 0
    tokens = slice(first_token, first_token + num_queries * len(rows))
    ends = _ends_beyond(layout, tokens, queries) if attended.sees_whole_pictures else ()
    return _PlannedGroup(
        tokens=tokens,
        num_queries=num_queries,
        is_causal=bool(is_whole_prompt)
        and not ends
        and all(limit is None or limit >= num_queries for limit in (window, chunk)),
        arrays=(table, padded_blocks, padding[padded_blocks], queries, slots, *ends),
    )


def _ends_beyond(layout: PassLayout, tokens: slice, queries: Ints) -> tuple[Ints, ...]:
    """Return the ends of what these queries see, unless each sees up to itself."""
    if layout.seen_ends is None:
        return ()
    ends = layout.seen_ends[tokens].reshape(queries.shape)
    return (ends,) if (ends > queries + 1).any() else ()
