"""Paged attention of every implementation against token-by-token attention in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.runner.attention.paged_attention import (
    TorchPagedAttention,
)
from baton.engine.runner.kernels.native_attention import NativePagedAttention
from tests.support.attention_world import MakeAttention, Part, Shape, World, bits
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.triton_parts import triton_attention

# Of torch. The kernels have two.
pytestmark = pytest.mark.usefixtures("one_thread")

ALL_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Implementation:
    make: MakeAttention
    dtypes: tuple[torch.dtype, ...] = ALL_FLOATS
    kv_dtype: torch.dtype | None = None  # of the cache; None: that of the shape

    def fit(self, shape: Shape) -> Shape:
        """Return the shape in a dtype of this implementation."""
        dtype = shape.dtype if shape.dtype in self.dtypes else self.dtypes[0]
        return replace(shape, dtype=dtype, kv_dtype=self.kv_dtype)


# Add a kernel here to include it in the suite.
IMPLEMENTATIONS = {"torch": Implementation(TorchPagedAttention)} | {
    name: Implementation(partial(NativePagedAttention, kernels), (torch.bfloat16,))
    for name, kernels in kernels_by_variant().items()
}
IMPLEMENTATIONS["triton"] = Implementation(triton_attention)
IMPLEMENTATIONS |= {
    f"{name}-{kv}": replace(each, kv_dtype=dtype)
    for name, each in IMPLEMENTATIONS.items()
    for kv, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
    if (name, kv) != ("triton", "fp8")  # refused
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


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
        blocks, slots = (
            torch.from_numpy(layout.write_blocks[0]),
            torch.from_numpy(layout.write_offsets),
        )
        scales = world.shape.scales(layer)
        for tensor, numbers in enumerate(world.fresh(layer)):
            if numbers is None:
                continue
            stored = world.shape.stored(
                numbers, None if scales is None else scales[tensor, :, None]
            )
            assert torch.equal(bits(world.kv[blocks, layer, tensor, :, slots]), bits(stored))
            before[blocks, layer, tensor, :, slots] = stored
    assert torch.equal(bits(world.kv), bits(before))


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
PICTURES = st.just(range(0)) | st.builds(range, st.integers(0, 5), st.integers(6, 20))
CHUNKS = st.builds(
    lambda computed, queries, picture: Part(
        computed, queries, picture if picture.stop <= queries else range(0)
    ),
    computed=st.integers(0, 40),
    queries=st.integers(1, 24),
    picture=PICTURES,
)
DECODES = st.builds(Part, computed=st.integers(0, 90), queries=st.just(1))


def parametrize_implementations(*triton_marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "implementation",
        [
            pytest.param(each, id=name, marks=triton_marks if "triton" in name else ())
            for name, each in IMPLEMENTATIONS.items()
        ],
    )


each_implementation = parametrize_implementations()
# Takes the interpreter of Triton long.
each_implementation_at_length = parametrize_implementations(pytest.mark.triton)


@each_implementation_at_length
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


@each_implementation_at_length
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


@each_implementation_at_length
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


@each_implementation_at_length
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


@each_implementation_at_length
@pytest.mark.parametrize("window", [None, 5, 100])
def test_tokens_of_a_picture_see_each_other_across_tiles(
    implementation: Implementation, window: int | None
) -> None:
    shape = implementation.fit(Shape(head_dim=64, windows=(window, None)))
    long = 24 if implementation.make is triton_attention else 300  # the interpreter is slow
    pictures = [Part(250, long, range(3, long - 5)), Part(0, 17, range(17)), Part(7, 1)]
    check(implementation.make, World(shape, [*pictures, Part(3, 9)], seed=6))


@each_implementation
def test_a_kv_head_can_have_many_query_heads(implementation: Implementation) -> None:
    shape = implementation.fit(Shape(num_heads=40, num_kv_heads=2))
    check(implementation.make, World(shape, [Part(5, 1), Part(3, 6)], seed=3))


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

    # FP8 saturates.
    is_kept = implementation.kv_dtype is torch.float8_e4m3fn and math.isinf(number)
    assert (first[0].isfinite().all(dim=-1) == is_kept).all()
    assert first[1:].isfinite().all()


@each_implementation
def test_padding_rows_write_into_the_scratch_block_and_change_no_other_row(
    implementation: Implementation,
) -> None:
    shape = implementation.fit(Shape(num_layers=1, windows=(None,), chunks=(None,)))
    world, padded = (World(shape, [Part(3, 1), Part(9, 1)], seed=5) for _ in range(2))
    scratch = next(iter(set(range(len(world.kv))) - {b for table in world.tables for b in table}))

    [expected] = world.attend(implementation.make)
    layout = padded.layout()
    layout = layout.pad(4, layout.block_tables.shape[2] + 2, scratch)
    running = implementation.make(padded.kv, [padded.attention(0)]).begin(layout)
    key, value = padded.fresh(0)
    assert value is not None
    running.write(0, with_zeros(key), with_zeros(value))
    found = running.attend(0, with_zeros(padded.queries[0]))

    assert found.isfinite().all()
    assert torch.allclose(found[:2], expected, atol=TOLERANCE[shape.dtype])
    padded.kv[scratch] = world.kv[scratch]
    assert torch.equal(bits(padded.kv), bits(world.kv))


def with_zeros(rows: Tensor) -> Tensor:
    """Append two rows of zeros."""
    return torch.cat((rows, torch.zeros_like(rows)))[:4]
