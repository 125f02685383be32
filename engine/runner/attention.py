"""Paged attention: the Protocol that kernels must keep to, and the plain torch reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.runner.layout import Ints, PassLayout


class AttentionPass(Protocol):
    """One forward pass; made anew for each, so that its masks are built once for all layers."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """The tokens' keys and values, [tokens, kv_heads, head_dim], into their blocks."""
        ...

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Once the tokens' own keys and values are written.

        query [tokens, heads, head_dim]; the answer is like it. A token sees its own sequence up
        to itself, within the layer's window. Blocks and slots outside a sequence's context may
        hold anything, NaN too, and must not matter.
        """
        ...


class PagedAttention(Protocol):
    """Attention over one KV tensor, which it alone reads and writes by layer."""

    def begin(self, layout: PassLayout) -> AttentionPass: ...


class TorchPagedAttention:
    """The reference: gathers each sequence's blocks and leaves the rest to torch."""

    def __init__(self, kv: Tensor, windows: Sequence[int | None]) -> None:
        self._kv = kv
        self._windows = tuple(windows)

    def begin(self, layout: PassLayout) -> AttentionPass:
        work = {window: _work(layout, window, self._kv) for window in set(self._windows)}
        write_blocks = torch.from_numpy(layout.write_blocks).to(self._kv.device)
        write_offsets = torch.from_numpy(layout.write_offsets).to(self._kv.device)
        works = [work[window] for window in self._windows]
        return _TorchPass(self._kv, works, write_blocks, write_offsets)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with equally many tokens, padded to equally many blocks."""

    first_token: int
    num_queries: int  # of each sequence; 1, or any number for a group of one sequence
    block_table: Tensor  # [sequences, blocks]
    dead_blocks: Tensor  # flat places in block_table that hold slots nobody may see,
    dead_slots: Tensor  # and which slots those are: [dead blocks, block_size, 1]
    mask: Tensor | None  # [1, sequences, queries, slots], added to scores; None is causal

    @property
    def tokens(self) -> slice:
        num_tokens = self.num_queries * self.block_table.shape[0]
        return slice(self.first_token, self.first_token + num_tokens)


class _TorchPass:
    def __init__(
        self, kv: Tensor, works: list[list[_Group]], write_blocks: Tensor, write_offsets: Tensor
    ) -> None:
        self._kv = kv
        self._works = works
        self._write_blocks = write_blocks
        self._write_offsets = write_offsets

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._kv[self._write_blocks, layer, 0, :, self._write_offsets] = key
        self._kv[self._write_blocks, layer, 1, :, self._write_offsets] = value

    def attend(self, layer: int, query: Tensor) -> Tensor:
        answer = torch.empty_like(query)
        for group in self._works[layer]:
            keys, values = self._gather(layer, group)
            attend = _attend_many if group.num_queries == 1 else _attend_one
            answer[group.tokens] = attend(query[group.tokens], keys, values, group.mask)
        return answer

    def _gather(self, layer: int, group: _Group) -> tuple[Tensor, Tensor]:
        """The group's keys and values, each [kv_heads, sequences, slots, head_dim]."""
        num_sequences, num_blocks = group.block_table.shape
        by_head = self._kv[:, layer].permute(1, 2, 0, 3, 4)
        blocks = by_head.index_select(2, group.block_table.flatten())
        _, num_kv_heads, _, block_size, head_dim = blocks.shape
        if group.dead_blocks.numel():
            # A weight of zero does not hide a NaN, so what must not be seen is made zero.
            cleaned = blocks[:, :, group.dead_blocks].masked_fill(group.dead_slots, 0.0)
            blocks[:, :, group.dead_blocks] = cleaned
        keys, values = blocks.view(
            2, num_kv_heads, num_sequences, num_blocks * block_size, head_dim
        )
        return keys, values


def _attend_many(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """One token each of many sequences; the heads that share a KV head are its queries."""
    num_kv_heads, num_sequences, _, head_dim = keys.shape
    grouped = query.view(num_sequences, num_kv_heads, -1, head_dim).transpose(0, 1)
    answer = functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return answer.transpose(0, 1).reshape(query.shape)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Many tokens of one sequence; the heads that share a KV head are a dimension."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, _, num_slots, _ = keys.shape
    shared = num_heads // num_kv_heads
    answer = functional.scaled_dot_product_attention(
        query.view(num_tokens, num_kv_heads, shared, head_dim).permute(1, 2, 0, 3),
        keys.expand(num_kv_heads, shared, num_slots, head_dim),
        values.expand(num_kv_heads, shared, num_slots, head_dim),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return answer.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)


def _work(layout: PassLayout, window: int | None, kv: Tensor) -> list[_Group]:
    block_size = kv.shape[4]
    num_single = layout.num_single
    starts = layout.query_starts
    singles = _alike(layout.context_lens[:num_single], block_size)
    chunks = [(row, row + 1) for row in range(num_single, len(layout.num_queries))]
    return [
        _group(layout, np.arange(first, last), int(starts[first]), window, kv)
        for first, last in (*singles, *chunks)
    ]


def _alike(context_lens: Ints, block_size: int) -> list[tuple[int, int]]:
    """Runs of neighbours whose padding wastes at most about half."""
    if not len(context_lens):
        return []
    sizes = np.frexp((context_lens - 1) // block_size + 1)[1]
    cuts = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return list(itertools.pairwise(cuts))


def _group(
    layout: PassLayout, rows: Ints, first_token: int, window: int | None, kv: Tensor
) -> _Group:
    block_size, num_queries = kv.shape[4], int(layout.num_queries[rows[0]])
    lens = layout.context_lens[rows]
    first_query = lens - num_queries
    first_seen = np.zeros_like(lens) if window is None else np.maximum(first_query - window + 1, 0)
    first_block = first_seen // block_size
    num_blocks = int((((lens - 1) // block_size) - first_block).max()) + 1
    columns = first_block[:, None] + np.arange(num_blocks)
    # A place past the context repeats its last block: any would do, its slots are dead.
    columns = np.minimum(columns, ((lens - 1) // block_size)[:, None])
    table = layout.block_tables[rows[:, None], columns]
    slots = (first_block * block_size)[:, None] + np.arange(num_blocks * block_size)
    dead = (slots >= lens[:, None]).reshape(-1, block_size)
    dead_blocks = np.flatnonzero(dead.any(axis=1))
    queries = first_query[:, None] + np.arange(num_queries)
    return _Group(
        first_token=first_token,
        num_queries=num_queries,
        block_table=torch.from_numpy(table).to(kv.device),
        dead_blocks=torch.from_numpy(dead_blocks).to(kv.device),
        dead_slots=torch.from_numpy(dead[dead_blocks]).to(kv.device)[:, :, None],
        mask=_mask(queries, slots, window, kv),
    )


def _mask(queries: Ints, slots: Ints, window: int | None, kv: Tensor) -> Tensor | None:
    """queries and slots are positions in the sequence, [sequences, any]."""
    is_whole_prompt = queries.shape[1] > 1 and queries[0, 0] == 0 and slots[0, 0] == 0
    if is_whole_prompt and (window is None or window >= queries.shape[1]):
        return None
    query = torch.from_numpy(queries).to(kv.device)[None, :, :, None]
    slot = torch.from_numpy(slots).to(kv.device)[None, :, None, :]
    hidden = slot > query
    if window is not None:
        hidden = hidden | (slot <= query - window)
    return torch.zeros(hidden.shape, dtype=kv.dtype, device=kv.device).masked_fill_(
        hidden, float("-inf")
    )
