"""Sequences with random keys and values in a paged cache, and their attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.runner.attention.byte_kv import dequantize, quantize
from baton.engine.runner.attention.paged_attention import LayerAttention, PagedAttention
from baton.engine.runner.model.pass_layout import Ints, PassLayout

MakeAttention = Callable[[Tensor, Sequence[LayerAttention]], PagedAttention]


def bits(numbers: Tensor) -> Tensor:
    """Return the bytes of numbers. Those of a NaN are equal to themselves."""
    return numbers.contiguous().view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    num_layers: int = 2
    windows: tuple[int | None, ...] = (None, None)
    chunks: tuple[int | None, ...] = (None, None)
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32
    value_dim: int | None = None  # leading numbers of a key that are its value
    kv_dtype: torch.dtype | None = None  # None: `dtype`

    @property
    def num_tensors(self) -> int:
        return 2 if self.value_dim is None else 1

    def stored(self, keys_values: Tensor, scales: Tensor | None = None) -> Tensor:
        """Return the slots that the cache holds of keys or values, [.., head_dim]."""
        return quantize(keys_values, self.kv_dtype or self.dtype, scales)

    def scales(self, layer: int) -> Tensor | None:
        """Return the scales of FP8, [tensors, kv_heads], which no other dtype has."""
        if self.kv_dtype is not torch.float8_e4m3fn:
            return None
        count = self.num_tensors * self.num_kv_heads
        numbers = 0.37 + 0.25 * layer + 0.05 * torch.arange(count)
        return numbers.view(self.num_tensors, self.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Part:
    """Share of one sequence in the pass."""

    computed: int  # tokens whose KV is in the cache before the pass
    queries: int
    picture: range = range(0)  # queries that see each other

    @property
    def length(self) -> int:
        return self.computed + self.queries

    def seen_end(self, query: int) -> int:
        """Return the end of the tokens that a query sees."""
        return self.computed + (self.picture.stop if query in self.picture else query + 1)


class World:
    """Sequences with random keys and values, in blocks surrounded by garbage."""

    def __init__(self, shape: Shape, sequences: list[Part], seed: int) -> None:
        self.shape = shape
        # Single tokens first, as the layout requires.
        self.sequences = sorted(sequences, key=lambda each: each.queries != 1)
        self._generator = torch.Generator().manual_seed(seed)
        kv_shape = (shape.num_tensors, shape.num_layers, shape.num_kv_heads, shape.head_dim)
        # By sequence: [tensors, layers, kv_heads, head_dim, tokens].
        self.keys_values = [
            self._random(*kv_shape, each.length).to(shape.dtype) for each in self.sequences
        ]
        total = sum(each.queries for each in self.sequences)
        self.queries = self._random(shape.num_layers, total, shape.num_heads, shape.head_dim)
        self.queries = self.queries.to(shape.dtype)
        self.sinks = 2 * self._random(shape.num_layers, shape.num_heads)
        # As the cache holds them: [tensors, layers, kv_heads, tokens, ..].
        self._slots = [
            shape.stored(each.transpose(-1, -2), self._scales()) for each in self.keys_values
        ]
        self.tables = self._tables()
        self.kv = self._cache()

    def layout(self) -> PassLayout:
        size = self.shape.block_size
        widest = max(map(len, self.tables))
        # Entries beyond a sequence's blocks are invalid block ids.
        padded = [table + [10**6] * (widest - len(table)) for table in self.tables]
        places = [
            (i, p)
            for i, each in enumerate(self.sequences)
            for p in range(each.computed, each.length)
        ]
        return PassLayout(
            num_queries=np.array([each.queries for each in self.sequences]),
            context_lens=np.array([each.length for each in self.sequences]),
            block_tables=np.array([padded]),
            positions=np.array([position for _, position in places]),
            write_blocks=np.array([[self.tables[i][p // size] for i, p in places]]),
            write_offsets=np.array([p % size for _, p in places]),
            seen_ends=self._seen_ends(),
        )

    def _seen_ends(self) -> Ints | None:
        if not any(each.picture for each in self.sequences):
            return None
        return np.array(
            [each.seen_end(query) for each in self.sequences for query in range(each.queries)]
        )

    def attend(self, make: MakeAttention) -> list[Tensor]:
        """Return the outputs by layer, in the order in which the model calls attention."""
        layers = [self.attention(layer) for layer in range(self.shape.num_layers)]
        running = make(self.kv, layers).begin(self.layout())
        answers = []
        for layer in range(self.shape.num_layers):
            running.write(layer, *self.fresh(layer))
            answers.append(running.attend(layer, self.queries[layer]))
        return answers

    def expected(self, layer: int) -> Tensor:
        answers, first = [], 0
        for each, keys_values in zip(self.sequences, self._kept(), strict=True):
            queries = self.queries[layer, first : first + each.queries]
            answers.append(self._naive(layer, each, queries, keys_values[:, layer]))
            first += each.queries
        return torch.cat(answers)

    def _kept(self) -> list[Tensor]:
        """Return keys and values as the cache holds them, in float64."""
        scales = self._scales()
        return [dequantize(each, torch.float64, scales).transpose(-1, -2) for each in self._slots]

    def _scales(self) -> Tensor | None:
        """Return the scales of FP8, [tensors, layers, kv_heads, 1, 1]."""
        scales = [self.shape.scales(layer) for layer in range(self.shape.num_layers)]
        present = [each for each in scales if each is not None]
        return torch.stack(present, dim=1)[..., None, None] if present else None

    def attention(self, layer: int) -> LayerAttention:
        shape = self.shape
        sinks = self.sinks[layer] if shape.has_sinks else None
        window, chunk = shape.windows[layer], shape.chunks[layer]
        return LayerAttention(
            shape.head_dim**-0.5,
            window,
            chunk,
            shape.softcap,
            sinks,
            index_in_block=layer,
            value_dim=shape.value_dim,
            kv_scales=shape.scales(layer),
        )

    def _naive(self, layer: int, part: Part, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Compute the scores of all tokens in float64, and mask those that a query does not see."""
        shape = self.shape
        keys, values = keys_values[0], keys_values[-1, :, : shape.value_dim]
        # By KV head: [kv_heads, heads of one, queries, ..].
        grouped = queries.double().transpose(0, 1).unflatten(0, (shape.num_kv_heads, -1))
        scores = grouped @ keys[:, None] / math.sqrt(shape.head_dim)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        scores.masked_fill_(~self._seen(layer, part), -torch.inf)
        if shape.has_sinks:
            sinks = self.sinks[layer].double().view(*scores.shape[:2], 1, 1)
            scores = torch.cat((scores, sinks.expand(-1, -1, part.queries, 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[-1]]
        return torch.flatten(weights @ values.transpose(-1, -2)[:, None], 0, 1).transpose(0, 1)

    def _seen(self, layer: int, part: Part) -> Tensor:
        """Return which tokens each query sees, [queries, tokens]."""
        window, chunk = self.shape.windows[layer], self.shape.chunks[layer]
        seen = torch.zeros(part.queries, part.length, dtype=torch.bool)
        for query in range(part.queries):
            position = part.computed + query
            first = 0 if window is None else max(0, position - window + 1)
            first = first if chunk is None else max(first, position // chunk * chunk)
            seen[query, first : part.seen_end(query)] = True
        return seen

    def fresh(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """Return the keys of the pass's new tokens, and their values if stored, in flat order."""
        parts = [
            keys_values[:, layer, :, :, each.computed :].permute(0, 3, 1, 2)
            for each, keys_values in zip(self.sequences, self.keys_values, strict=True)
        ]
        tensors = torch.cat(parts, dim=1)
        return tensors[0], tensors[1] if len(tensors) == 2 else None

    def _tables(self) -> list[list[int]]:
        size = self.shape.block_size
        counts = [-(-each.length // size) for each in self.sequences]
        order = torch.randperm(sum(counts) + 3, generator=self._generator).tolist()
        return [[order.pop() for _ in range(count)] for count in counts]

    def _cache(self) -> Tensor:
        """Return a cache with the KV computed before the pass, and NaN everywhere else.

        NaN is also in blocks that no token of the pass attends to, as after their release.
        """
        shape = self.shape
        num_blocks = sum(map(len, self.tables)) + 3
        heads = shape.num_kv_heads, shape.block_size, shape.head_dim
        kv = shape.stored(
            torch.full(
                (num_blocks, shape.num_layers, shape.num_tensors, *heads),
                math.nan,
                dtype=shape.dtype,
            )
        )
        for each, table, stored in zip(self.sequences, self.tables, self._slots, strict=True):
            positions = torch.arange(self._first_seen(each), each.computed)
            blocks = torch.tensor(table)[positions // shape.block_size]
            kv[blocks, :, :, :, positions % shape.block_size] = stored[..., positions, :].permute(
                3, 1, 0, 2, 4
            )
        return kv

    def _first_seen(self, part: Part) -> int:
        """Return the first token of the first block that a token of the pass attends to."""
        unseen = [
            max(
                KvCacheSpec(window=window).num_unseen(part.computed),
                KvCacheSpec(chunk=chunk).num_unseen(part.computed),
            )
            for window, chunk in zip(self.shape.windows, self.shape.chunks, strict=True)
        ]
        return min(unseen) // self.shape.block_size * self.shape.block_size

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)
