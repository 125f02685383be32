"""Paged attention of every implementation against token-by-token attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.kv_cache.groups import KvCacheSpec
from baton.engine.runner.attention.int8_kv import dequantize, quantize
from baton.engine.runner.attention.paged_attention import (
    LayerAttention,
    PagedAttention,
    TorchPagedAttention,
)
from baton.engine.runner.kernels.native_attention import NativePagedAttention
from baton.engine.runner.layout import PassLayout
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant

MakeAttention = Callable[[Tensor, Sequence[LayerAttention]], PagedAttention]
ALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    is_int8: bool = False

    @property
    def num_tensors(self) -> int:
        return 2 if self.value_dim is None else 1

    def stored(self, keys_values: Tensor) -> Tensor:
        """Return the slots that the cache holds of keys or values, [.., head_dim]."""
        return quantize(keys_values) if self.is_int8 else keys_values

    def read(self, stored: Tensor) -> Tensor:
        return dequantize(stored, torch.float64) if self.is_int8 else stored.double()


@dataclass(frozen=True, slots=True)
class Implementation:
    make: MakeAttention
    dtypes: tuple[torch.dtype, ...] = ALL_FLOATS
    is_int8: bool = False  # keys and values in the cache

    def fit(self, shape: Shape) -> Shape:
        """Return the shape in a dtype of this implementation."""
        dtype = shape.dtype if shape.dtype in self.dtypes else self.dtypes[0]
        return replace(shape, dtype=dtype, is_int8=self.is_int8)


# Add a kernel here to include it in the suite.
IMPLEMENTATIONS = {"torch": Implementation(TorchPagedAttention)} | {
    name: Implementation(partial(NativePagedAttention, kernels), (torch.bfloat16,))
    for name, kernels in kernels_by_variant().items()
}
IMPLEMENTATIONS |= {
    f"{name}-int8": replace(each, is_int8=True) for name, each in IMPLEMENTATIONS.items()
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class Part:
    """Share of one sequence in the pass."""

    computed: int  # tokens whose KV is in the cache before the pass
    queries: int

    @property
    def length(self) -> int:
        return self.computed + self.queries


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
        self._slots = [shape.stored(each.transpose(-1, -2)) for each in self.keys_values]
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
        )

    def attend(self, make: MakeAttention) -> list[Tensor]:
        """Return the outputs by layer, in the order in which the model calls attention."""
        layers = [self._attention(layer) for layer in range(self.shape.num_layers)]
        running = make(self.kv, layers).begin(self.layout())
        answers = []
        for layer in range(self.shape.num_layers):
            running.write(layer, *self._fresh(layer))
            answers.append(running.attend(layer, self.queries[layer]))
        return answers

    def expected(self, layer: int) -> Tensor:
        answers, first = [], 0
        for each, keys_values in zip(self.sequences, self._kept(), strict=True):
            for place in range(each.queries):
                query = self.queries[layer, first + place]
                answers.append(self._naive(layer, query, keys_values, each.computed + place))
            first += each.queries
        return torch.stack(answers)

    def _kept(self) -> list[Tensor]:
        """Return keys and values as the cache holds them, in float64."""
        return [self.shape.read(each).transpose(-1, -2) for each in self._slots]

    def _attention(self, layer: int) -> LayerAttention:
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
        )

    def _naive(self, layer: int, query: Tensor, keys_values: Tensor, position: int) -> Tensor:
        shape, window, chunk = self.shape, self.shape.windows[layer], self.shape.chunks[layer]
        first = 0 if window is None else max(0, position - window + 1)
        first = first if chunk is None else max(first, position // chunk * chunk)
        seen = keys_values[:, layer, :, :, first : position + 1]
        keys, values = seen[0], seen[-1, :, : shape.value_dim]
        # By KV head: [kv_heads, heads of one, ..].
        grouped = query.double().unflatten(0, (shape.num_kv_heads, -1))
        scores = grouped @ keys / math.sqrt(shape.head_dim)
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if shape.has_sinks:
            sinks = self.sinks[layer].double().view(*scores.shape[:2], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[-1]]
        return torch.flatten(weights @ values.transpose(-1, -2), 0, 1)

    def _fresh(self, layer: int) -> tuple[Tensor, Tensor | None]:
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


def check(make: MakeAttention, world: World) -> None:
    before = world.kv.clone()

    answers = world.attend(make)

    for layer, answer in enumerate(answers):
        value_dim = world.shape.value_dim or world.shape.head_dim
        assert answer.shape == (*world.queries[layer].shape[:2], value_dim)
        assert answer.dtype == world.shape.dtype
        error = (answer.double() - world.expected(layer)).abs().max()
        assert error < TOLERANCE[world.shape.dtype], f"layer {layer} is off by {error}"
    check_writes(world, before)


def check_writes(world: World, before: Tensor) -> None:
    """Check that each new token's slot holds its KV, and that all other slots are unchanged."""
    layout = world.layout()
    for layer in range(world.shape.num_layers):
        keys, values = world._fresh(layer)
        keys = world.shape.stored(keys)
        values = None if values is None else world.shape.stored(values)
        blocks, slots = (
            torch.from_numpy(layout.write_blocks[0]),
            torch.from_numpy(layout.write_offsets),
        )
        assert torch.equal(world.kv[blocks, layer, 0, :, slots], keys)
        before[blocks, layer, 0, :, slots] = keys
        if values is not None:
            assert torch.equal(world.kv[blocks, layer, 1, :, slots], values)
            before[blocks, layer, 1, :, slots] = values
    assert torch.equal(world.kv.nan_to_num(nan=9e9), before.nan_to_num(nan=9e9))


SHAPES = st.builds(
    lambda kv_heads, shared, **others: Shape(
        num_heads=kv_heads * shared, num_kv_heads=kv_heads, **others
    ),
    kv_heads=st.sampled_from([1, 2, 3]),
    shared=st.sampled_from([1, 2, 4]),
    head_dim=st.sampled_from([8, 24, 64]),
    block_size=st.sampled_from([1, 4, 16]),
    windows=st.tuples(*[st.none() | st.integers(1, 40)] * 2),
    chunks=st.tuples(*[st.none() | st.integers(1, 40)] * 2),
    softcap=st.sampled_from([None, 1.5, 30.0]),
    has_sinks=st.booleans(),
    dtype=st.sampled_from(ALL_FLOATS),
)
CHUNKS = st.builds(Part, computed=st.integers(0, 40), queries=st.integers(1, 24))
DECODES = st.builds(Part, computed=st.integers(0, 90), queries=st.just(1))


each_implementation = pytest.mark.parametrize(
    "implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys()
)


@each_implementation
@given(
    shape=SHAPES,
    sequences=st.lists(CHUNKS | DECODES, min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=num_examples(60))
def test_any_mix_of_chunks_and_decodes_equals_attention_token_by_token(
    implementation: Implementation, shape: Shape, sequences: list[Part], seed: int
) -> None:
    check(implementation.make, World(implementation.fit(shape), sequences, seed))


@each_implementation
@given(
    shape=SHAPES,
    latent=st.sampled_from([(8, 8), (40, 32), (48, 40), (96, 64), (160, 128)]),
    sequences=st.lists(CHUNKS | DECODES, min_size=1, max_size=7),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40, deadline=None)
def test_keys_that_contain_their_values_equal_attention_token_by_token(
    implementation: Implementation,
    shape: Shape,
    latent: tuple[int, int],
    sequences: list[Part],
    seed: int,
) -> None:
    head_dim, value_dim = latent
    shape = implementation.fit(replace(shape, head_dim=head_dim, value_dim=value_dim))
    check(implementation.make, World(shape, sequences, seed))


@each_implementation
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 16, 200, 1000])
@pytest.mark.parametrize(
    "sequences",
    [
        [Part(0, 1)],
        [Part(0, 4)],
        [Part(0, 9)],
        [Part(3, 1), Part(4, 1), Part(5, 1)],
        [Part(8, 8)],
        [Part(7, 2), Part(0, 1), Part(63, 1), Part(0, 5)],
        [Part(255, 1), Part(256, 1), Part(520, 1), Part(250, 20), Part(511, 3)],
    ],
    ids=["first", "block", "prompt", "edge", "chunk", "mixed", "long"],
)
def test_attention_is_correct_at_block_and_window_boundaries(
    implementation: Implementation, window: int | None, sequences: list[Part]
) -> None:
    shape = implementation.fit(Shape(windows=(window, None)))
    check(implementation.make, World(shape, sequences, seed=1))


@each_implementation
@pytest.mark.parametrize("chunk", [None, 16, 100, 300])
def test_softcaps_sinks_and_chunks_are_correct_across_tiles(
    implementation: Implementation, chunk: int | None
) -> None:
    shape = Shape(
        head_dim=64,
        windows=(None, 200),
        chunks=(chunk, chunk),
        softcap=1.5,
        has_sinks=True,
    )
    sequences = [Part(255, 1), Part(520, 1), Part(240, 40), Part(511, 3)]
    check(implementation.make, World(implementation.fit(shape), sequences, seed=2))


@each_implementation
def test_a_sequence_with_nan_affects_no_other(implementation: Implementation) -> None:
    sequences = [Part(6, 1), Part(9, 1), Part(5, 1), Part(2, 7)]
    shape = implementation.fit(Shape())
    sound, spoilt = (World(shape, sequences, seed=4) for _ in range(2))
    spoilt.kv[spoilt.tables[1]] = shape.stored(
        torch.full((shape.head_dim,), math.nan, dtype=shape.dtype)
    )

    expected, answers = sound.attend(implementation.make), spoilt.attend(implementation.make)

    others = [0, *range(2, len(expected[0]))]
    assert answers[0][1].isnan().all()
    assert torch.equal(answers[0][others], expected[0][others])


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@each_implementation
def test_non_finite_numbers_are_propagated(implementation: Implementation, number: float) -> None:
    world = World(implementation.fit(Shape()), [Part(3, 1), Part(0, 9)], seed=5)
    world.keys_values[0][-1, :, :, 5, 3] = number

    first, _ = world.attend(implementation.make)

    assert not first[0].isfinite().all(dim=-1).any()
    assert first[1:].isfinite().all()
