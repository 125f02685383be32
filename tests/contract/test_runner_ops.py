"""Decoder operations: each kernel against plain torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.checkpoint.quantized import Quantized, stacked
from baton.core.errors import InvalidConfig
from baton.engine.runner.kernels.build import (
    VARIANTS,
    KernelsUnavailable,
    best_variant,
    cpu_features,
    library,
)
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import TORCH, choose_parts
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model.config import Activation
from baton.engine.runner.model.ops import MlpGate, Norm, Ops
from baton.engine.runner.weights.quantize import Quantize, select_rows, to_int4, to_int8
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.random_mxfp4 import random_mxfp4
from tests.support.random_quantized import random_quantized, to_int4_zeros, with_offsets
from tests.support.triton_parts import batch_invariant_ops, triton_ops

EPSILON = 1e-6
REFERENCE = Ops()
CPU = torch.device("cpu")

SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_variant = pytest.mark.parametrize(
    "kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys()
)


def parametrize_ops(*triton_marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Run a test with each implementation of the elementwise operations."""
    native = [
        pytest.param(partial(NativeOps, kernels), id=name)
        for name, kernels in kernels_by_variant().items()
    ]
    triton = pytest.param(triton_ops, id="triton", marks=triton_marks)
    return pytest.mark.parametrize("make_ops", [*native, triton])


each_ops = parametrize_ops()
# Takes the interpreter of Triton long.
each_ops_at_length = parametrize_ops(pytest.mark.triton)
COLUMNS = st.integers(1, 70).map(lambda pairs: 2 * pairs)
SEEDS = st.integers(0, 2**32)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def make_norm(size: int, rounds_once: bool) -> Norm:
    weight = drawn(6, size)
    return Norm(weight.float() * 1.001 if rounds_once else weight, EPSILON, rounds_once)


def is_near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether the values are within two bfloat16 roundings."""
    return torch.allclose(found.float(), wanted.float(), rtol=2**-7, atol=2**-7)


# Few distinct numbers, so that the largest often occurs twice.
STRANGE = (float("nan"), float("inf"), float("-inf"))
LOGITS = st.sampled_from([-2.0, -1.0, 0.0, 1.5, 2.0]) | st.sampled_from(STRANGE)


@each_ops
@given(
    rows=st.integers(1, 70).flatmap(
        lambda size: st.lists(
            st.lists(LOGITS, min_size=size, max_size=size), min_size=1, max_size=5
        )
    )
)
@settings(max_examples=num_examples(60))
def test_a_peak_is_the_first_maximum_and_non_finite_rows_are_reported(
    make_ops: Callable[[], Ops], rows: list[list[float]]
) -> None:
    logits = torch.tensor(rows)

    found, wanted = make_ops().find_peaks(logits), REFERENCE.find_peaks(logits)

    assert found.are_finite.tolist() == wanted.are_finite.tolist()
    has_order = ~logits.isnan().any(dim=-1)
    assert found.token_ids[has_order].tolist() == wanted.token_ids[has_order].tolist()


@each_ops
def test_peaks_of_a_full_vocabulary_equal_those_of_torch(
    make_ops: Callable[[], Ops],
) -> None:
    logits = drawn(3, 9, 151_936).float()
    logits[4, 151_935] = logits[7, 151_935] = 99.0
    logits[8, 77_777] = float("inf")

    found = make_ops().find_peaks(logits)

    wanted = REFERENCE.find_peaks(logits)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.are_finite.tolist() == wanted.are_finite.tolist() == [True] * 8 + [False]


@each_variant
@given(num_tokens=st.integers(1, 20), num_rows=st.integers(1, 200), columns=COLUMNS, seed=SEEDS)
@settings(max_examples=num_examples(60))
def test_a_product_equals_float64_except_for_the_last_rounding(
    kernels: Kernels, num_tokens: int, num_rows: int, columns: int, seed: int
) -> None:
    activations, weight = drawn(seed, num_tokens, columns), drawn(seed + 1, num_rows, columns)
    bias = drawn(seed + 2, num_rows) if seed % 2 else None

    linear = NativeOps(kernels).linear(weight, bias)

    wanted = activations.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert is_near(linear(activations), wanted)
    every_row = torch.arange(num_rows).flip(0)
    assert torch.equal(linear.rows(every_row), weight[every_row])


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "columns", "dtype"),
    [
        (17, 33, 64, torch.bfloat16),
        *(
            pytest.param(*sizes, dtype, marks=pytest.mark.triton)
            for sizes in ((1, 70, 130), (41, 1, 7))
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
)
def test_batch_invariant_products_equal_float64(
    num_tokens: int, num_rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Sizes are no multiples of tiles."""
    tokens, weight = drawn(1, num_tokens, columns).to(dtype), drawn(2, num_rows, columns).to(dtype)
    heads, head_weights = drawn(3, num_tokens, 3, columns), drawn(4, 3, columns, num_rows)
    heads, head_weights = heads.to(dtype)[:, 1:], head_weights.to(dtype)[1:].mT
    bias, ops = drawn(5, num_rows).to(dtype), batch_invariant_ops()

    linear = ops.linear(weight, bias)
    found = linear(tokens), ops.head_linears(head_weights)(heads)

    wanted = (
        tokens.double() @ weight.double().T + bias.double(),
        torch.einsum("thc,hrc->thr", heads.double(), head_weights.double()),
    )
    for one, exact in zip(found, wanted, strict=True):
        tolerance = torch.finfo(dtype).eps * exact.abs().max().item()
        assert torch.allclose(one.double(), exact, rtol=0, atol=tolerance)
    every_row = torch.arange(num_rows).flip(0)
    assert torch.equal(linear.rows(every_row), weight[every_row])


@each_variant
@given(
    num_tokens=st.integers(1, 20),
    num_heads=st.integers(1, 5),
    num_rows=st.integers(1, 200),
    columns=COLUMNS,
    seed=SEEDS,
)
@settings(max_examples=40, deadline=None)
def test_each_head_is_multiplied_by_its_own_matrix(
    kernels: Kernels, num_tokens: int, num_heads: int, num_rows: int, columns: int, seed: int
) -> None:
    weights, wide = drawn(seed, num_heads, num_rows, columns), drawn(seed, num_heads, columns + 2)
    heads = (
        wide.repeat(num_tokens, 1, 1)[..., 1:-1] * torch.arange(1, num_tokens + 1)[:, None, None]
    )
    heads = heads.bfloat16()

    found = NativeOps(kernels).head_linears(weights)(heads)

    wanted = torch.einsum("thc,hrc->thr", heads.double(), weights.double())
    assert is_near(found, wanted)
    assert is_near(REFERENCE.head_linears(weights)(heads), wanted)
    alone = NativeOps(kernels).head_linears(weights)(heads[-1:])
    assert torch.equal(found[-1:], alone)


@each_variant
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 6, 7, 12, 33, 200, 500])
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    kernels: Kernels, num_tokens: int
) -> None:
    activations, weight = drawn(1, num_tokens, 96), drawn(2, 300, 96)
    linear = NativeOps(kernels).linear(weight, None)
    alone = NativeOps(_with_threads(kernels, 1)).linear(weight, None)

    together = linear(activations)

    assert torch.equal(
        together, torch.cat([alone(activations[i : i + 1]) for i in range(num_tokens)])
    )


@each_variant
def test_short_calls_one_after_the_other_have_the_bits_of_one_thread(kernels: Kernels) -> None:
    """Most threads of a call begin after its end, when the caller has done their parts."""
    activations, weight = drawn(1, 40, 96), drawn(2, 3000, 96)
    linear = NativeOps(_with_threads(kernels, 64)).linear(weight, None)
    expected = NativeOps(_with_threads(kernels, 1)).linear(weight, None)(activations)

    for token in [*range(len(activations))] * 25:
        assert torch.equal(linear(activations[token : token + 1]), expected[token : token + 1])


@each_variant
@pytest.mark.parametrize("num_tokens", [129, 255, 300])
def test_tokens_beyond_the_cpu_cache_are_all_multiplied(kernels: Kernels, num_tokens: int) -> None:
    activations, weight = drawn(1, num_tokens, 4096), drawn(2, 70, 4096)

    found = NativeOps(kernels).linear(weight, None)(activations)

    assert is_near(found, activations.double() @ weight.double().T)


@each_variant
def test_subnormal_products_have_the_same_bits_in_any_batch(
    kernels: Kernels,
) -> None:
    """Some processors flush subnormals to zero, but only in some of their instructions."""
    activations, weight = drawn(6, 40, 96) * 2.0**-70, drawn(7, 128, 96) * 2.0**-60
    linear = NativeOps(kernels).linear(weight, None)

    assert torch.equal(linear(activations), torch.cat([linear(row[None]) for row in activations]))


@each_variant
@pytest.mark.parametrize("has_bias", [False, True])
def test_outputs_larger_than_the_cpu_caches_have_the_same_bits(
    kernels: Kernels, has_bias: bool
) -> None:
    """Outputs of 1.1 MiB use non-temporal stores on processors with AVX-512-BF16."""
    activations, bias = drawn(3, 520, 70), drawn(5, 1088) if has_bias else None
    linear = NativeOps(kernels).linear(drawn(4, 1088, 70), bias)
    parts = torch.cat([linear(some) for some in activations.split(26)])

    assert torch.equal(linear(activations), parts)


def dequantizes(kernels: Kernels, bits: int, group: int) -> bool:
    """Return whether the kernels multiply weights rounded to bfloat16, not their integers."""
    is_tiled = group % 32 == 0 if bits == 4 else group in {16, 32}
    return is_tiled and "-amx-" in kernels.path.name


def multiplied(kernels: Kernels, weight: Quantized) -> Tensor:
    """Return the weights that the kernels multiply."""
    exact = replace(weight, dtype=torch.float64).dequantize()
    if not dequantizes(kernels, weight.bits, weight.group):
        return exact
    if weight.offsets is not None:
        exact = multiply_add(weight, weight.offsets)
    return exact.float().bfloat16().double()


def multiply_add(weight: Quantized, offsets: Tensor) -> Tensor:
    """Return numbers * scales + offsets, which `dequantize` rounds to float32 twice."""
    groups = torch.arange(weight.numbers.shape[1]) // weight.group
    scales, offsets = weight.scales.double()[:, groups], offsets.double()[:, groups]
    exact = weight.numbers.double() * scales + offsets
    return exact if weight.order is None else exact[:, weight.order.argsort()]


class Products(NamedTuple):
    """An implementation of products with quantized matrices."""

    make_ops: Callable[[], Ops]
    multiplied: Callable[[Quantized], Tensor]  # the weights that it multiplies, in float64


def parametrize_products() -> pytest.MarkDecorator:
    native = [
        pytest.param(Products(partial(NativeOps, kernels), partial(multiplied, kernels)), id=name)
        for name, kernels in kernels_by_variant().items()
    ]
    rounded = Products(triton_ops, lambda weight: weight.dequantize().double())
    triton = pytest.param(rounded, id="triton", marks=pytest.mark.triton)
    return pytest.mark.parametrize("products", [*native, triton])


each_products = parametrize_products()


@each_products
@pytest.mark.parametrize("bits", [4, 8])
@given(
    num_tokens=st.integers(1, 8),
    num_rows=st.integers(1, 200),
    num_columns=st.integers(1, 150),
    eights=st.integers(0, 5),
    scale_dtype=st.sampled_from(SCALE_DTYPES),
    has_offsets=st.booleans(),
    has_order=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=num_examples(60))
def test_a_product_of_int8_weights_equals_that_of_dequantized_ones(
    products: Products,
    bits: int,
    num_tokens: int,
    num_rows: int,
    num_columns: int,
    eights: int,
    scale_dtype: torch.dtype,
    has_offsets: bool,
    has_order: bool,
    seed: int,
) -> None:
    activations, bias = drawn(seed + 1, num_tokens, num_columns), drawn(seed + 2, num_rows)
    group = 8 * eights or num_columns
    weight = random_quantized(seed, num_rows, num_columns, bits, group, scale_dtype)
    weight = with_offsets(weight) if has_offsets else weight
    if has_order:
        order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(seed))
        weight = replace(weight, order=order)

    found = products.make_ops().linear(weight, bias)(activations)

    exact = products.multiplied(weight)
    wanted = activations.double() @ exact.T + bias.double()
    # A state is off by a 32512th of half the token's largest, an answer by half a rounding.
    most = activations.double().abs().amax(dim=1, keepdim=True)
    bound = most / 65024 * exact.abs().sum(dim=1) + wanted.abs() * 2**-8
    if has_offsets:  # their products cancel most of those of the numbers
        largest = (weight.numbers.amax() * weight.scales.float().amax()).double()
        bound += most * num_columns * largest * 2**-23
    assert ((found.double() - wanted).abs() <= bound * 1.01 + 1e-5).all()


@each_products
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [24, 256, 264])
@pytest.mark.parametrize("extreme", ["largest", "smallest"])
def test_sums_of_the_largest_products_are_exact(
    products: Products, bits: int, group: int, extreme: str
) -> None:
    weight = random_quantized(3, 70, group, bits, group, torch.bfloat16)
    number = {"largest": (1 << bits) - 1, "smallest": 0}[extreme]
    weight.numbers.fill_(number)
    weight.zeros.fill_(255 - number if bits == 8 else 0 if number else 16)
    activations = torch.full((3, group), 1.0, dtype=torch.bfloat16)

    found = products.make_ops().linear(weight, None)(activations)

    wanted = activations.double() @ products.multiplied(weight).T
    assert torch.equal(found, wanted.bfloat16())


@each_ops_at_length
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 33])
def test_scales_of_16_bits_are_read_exactly(
    make_ops: Callable[[], Ops], scale_dtype: torch.dtype, num_tokens: int
) -> None:
    weight = random_quantized(3, 150, 88, 4, 8, scale_dtype)
    every = torch.arange(weight.scales.numel()).to(torch.int16).view(scale_dtype)
    weight.scales.copy_(every.view_as(weight.scales))  # from zero and subnormal numbers on
    wide = replace(weight, scales=weight.scales.float())
    activations = drawn(4, num_tokens, 88)
    row_ids = torch.arange(150)

    short_scales, float32_scales = (make_ops().linear(each, None) for each in (weight, wide))

    assert torch.equal(short_scales.rows(row_ids), float32_scales.rows(row_ids))
    assert torch.equal(short_scales(activations), float32_scales(activations))


@each_variant
def test_a_float16_scale_can_be_infinite_or_negative(kernels: Kernels) -> None:
    scales = torch.tensor([-0.5, torch.inf, -torch.inf, torch.nan, -6e-8, 65504.0]).half()
    weight = random_quantized(3, 6, 8, 4, 8, torch.float16)
    weight.scales.copy_(scales[:, None])
    weight.zeros.fill_(0)
    weight.numbers.fill_(2)
    linear = NativeOps(kernels).linear(weight, None)

    rows, outputs = linear.rows(torch.arange(6)), linear(torch.ones(1, 8, dtype=torch.bfloat16))

    wanted = (2 * scales.float()).bfloat16()
    torch.testing.assert_close(rows, wanted[:, None].expand(6, 8), rtol=0, atol=0, equal_nan=True)
    wanted = (16 * scales.float()).bfloat16()
    torch.testing.assert_close(outputs, wanted[None], rtol=0, atol=0, equal_nan=True)


@each_ops_at_length
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_rows_of_int8_weights_equal_the_dequantized_ones(
    make_ops: Callable[[], Ops], bits: int, scale_dtype: torch.dtype
) -> None:
    weight = random_quantized(3, 150, 88, bits, 24, scale_dtype)
    row_ids = torch.tensor([149, 0, 64, 63, 64])

    for each in (weight, with_offsets(weight)):
        rows = make_ops().linear(each, None).rows(row_ids)
        assert torch.equal(rows, each.dequantize()[row_ids])


@each_variant
@pytest.mark.parametrize(
    "make",
    [
        *(to_int8, to_int4_zeros, lambda weight: with_offsets(to_int4_zeros(weight))),
        lambda weight: random_quantized(5, weight.shape[0], weight.shape[1], 8, 16),
        lambda weight: with_offsets(random_quantized(5, weight.shape[0], weight.shape[1], 8, 32)),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 33])
def test_int8_products_have_the_same_bits_in_any_batch(
    kernels: Kernels, make: Quantize, num_tokens: int
) -> None:
    activations, weight = drawn(1, num_tokens, 96), make(drawn(2, 300, 96))
    linear = NativeOps(kernels).linear(weight, None)
    alone = NativeOps(_with_threads(kernels, 1)).linear(weight, None)

    together = linear(activations)

    assert torch.equal(
        together, torch.cat([alone(activations[i : i + 1]) for i in range(num_tokens)])
    )
    assert torch.equal(together, linear(activations))


@each_variant
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "num_columns"),
    [(200, 64, 4096), (64, 8256, 64)],
    ids=["activations", "outputs"],
)
def test_int4_products_larger_than_the_cpu_caches_have_the_same_bits(
    kernels: Kernels, num_tokens: int, num_rows: int, num_columns: int
) -> None:
    activations, weight = (
        drawn(1, num_tokens, num_columns),
        to_int4_zeros(drawn(2, num_rows, num_columns)),
    )
    linear = NativeOps(kernels).linear(weight, None)

    parts = torch.cat([linear(some) for some in activations.split(7)])

    assert torch.equal(linear(activations), parts)


@each_products
@given(
    num_tokens=st.integers(1, 8),
    num_rows=st.integers(1, 200),
    num_columns=st.integers(1, 150),
    seed=SEEDS,
)
@settings(max_examples=num_examples(60))
def test_a_product_of_mxfp4_weights_equals_that_of_dequantized_ones(
    products: Products, num_tokens: int, num_rows: int, num_columns: int, seed: int
) -> None:
    activations, bias = drawn(seed + 1, num_tokens, num_columns), drawn(seed + 2, num_rows)
    weight = random_mxfp4(seed, num_rows, num_columns)

    found = products.make_ops().linear(weight, bias)(activations)

    exact = products.multiplied(weight)
    wanted = activations.double() @ exact.T + bias.double()
    most = activations.double().abs().amax(dim=1, keepdim=True)
    bound = most / 65024 * exact.abs().sum(dim=1) + wanted.abs() * 2**-8
    assert ((found.double() - wanted).abs() <= bound * 1.01 + 1e-5).all()


@each_ops_at_length
@pytest.mark.parametrize("exponents", [(-12, 4), (-127, -120), (118, 124)])
def test_every_code_and_exponent_of_mxfp4_is_decoded(
    make_ops: Callable[[], Ops], exponents: tuple[int, int]
) -> None:
    weight = random_mxfp4(3, 150, 88, exponents)
    weight.numbers[:16] = torch.arange(16)[:, None]
    row_ids = torch.tensor([*range(16), 149, 0, 64, 63, 64])

    rows = make_ops().linear(weight, None).rows(row_ids)

    assert torch.equal(rows, weight.dequantize()[row_ids])
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    wanted = torch.tensor([*values, *(-value for value in values)])
    assert torch.equal(rows[:16, 0], (wanted * weight.scales[:16, 0]).bfloat16())


@each_variant
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 7, 33])
def test_mxfp4_products_have_the_same_bits_in_any_batch(kernels: Kernels, num_tokens: int) -> None:
    activations, weight = drawn(1, num_tokens, 96), random_mxfp4(2, 300, 96)
    linear = NativeOps(kernels).linear(weight, None)
    alone = NativeOps(_with_threads(kernels, 1)).linear(weight, None)

    together = linear(activations)

    assert torch.equal(
        together, torch.cat([alone(activations[i : i + 1]) for i in range(num_tokens)])
    )


def test_rows_of_mxfp4_are_selected_and_stacked() -> None:
    first, second = random_mxfp4(1, 10, 64), random_mxfp4(2, 6, 64)
    order = torch.tensor([3, 0, 15, 9])

    chosen = select_rows(stacked([first, second]), order)

    assert isinstance(chosen, Quantized)
    both = torch.cat((first.dequantize(), second.dequantize()))
    assert torch.equal(chosen.dequantize(), both[order])


@pytest.mark.parametrize("columns", [8, 33, 96])
def test_the_quantization_error_is_at_most_half_a_step(columns: int) -> None:
    weight = drawn(11, 70, columns)
    weight[3] = 0
    wide = weight.float()

    eight, four = (replace(make(weight), dtype=torch.float32) for make in (to_int8, to_int4))

    assert torch.all((eight.dequantize() - wide).abs() <= eight.scales * 0.501)
    # Where zero falls between two steps, the ends of a group may be off by one half more.
    assert four.offset_steps is not None
    steps = four.scales.repeat_interleave(four.group, dim=1)[:, :columns]
    bound = steps * 1.001 + four.offset_steps.repeat_interleave(256, dim=1)[:, :columns] / 2
    assert torch.all((four.dequantize() - wide).abs() <= bound)
    assert torch.equal(four.dequantize()[3], torch.zeros(columns))


@each_ops_at_length
@given(
    num_tokens=st.integers(1, 5),
    num_heads=st.integers(1, 40),
    half=st.integers(1, 40),
    rounds_once=st.sampled_from([None, False, True]),
    seed=SEEDS,
)
@settings(max_examples=num_examples(40))
def test_head_norms_and_rope_equal_those_of_torch(
    make_ops: Callable[[], Ops],
    num_tokens: int,
    num_heads: int,
    half: int,
    rounds_once: bool | None,
    seed: int,
) -> None:
    size = 2 * half
    # Parts of a wider tensor, as queries and keys are.
    heads = drawn(seed, num_tokens, 2 * num_heads + 3, size)
    query, key = heads[:, 1 : 1 + num_heads], heads[:, 2 + num_heads : -1]
    angles = drawn(seed + 1, num_tokens, 1, size), drawn(seed + 2, num_tokens, 1, size)
    norm = None if rounds_once is None else make_norm(size, rounds_once)
    other = None if norm is None else replace(norm, weight=norm.weight.flip(0))
    ops = make_ops()

    rotated = ops.apply_rope(query, norm, angles)
    both = ops.apply_ropes((query, key), (norm, other), angles)

    assert is_near(rotated, REFERENCE.apply_rope(query, norm, angles))
    assert torch.equal(both[0], rotated)
    assert torch.equal(both[1], ops.apply_rope(key, other, angles))


@each_ops
def test_unlike_norms_of_queries_and_keys_equal_those_of_torch(make_ops: Callable[[], Ops]) -> None:
    heads, angles = (drawn(1, 3, 2, 8), drawn(2, 3, 1, 8)), (drawn(3, 3, 1, 8), drawn(4, 3, 1, 8))
    norm = make_norm(8, rounds_once=False)
    for norms in [(norm, None), (None, norm), (norm, replace(norm, epsilon=0.5))]:
        query, key = make_ops().apply_ropes(heads, norms, angles)

        assert is_near(query, REFERENCE.apply_rope(heads[0], norms[0], angles))
        assert is_near(key, REFERENCE.apply_rope(heads[1], norms[1], angles))


@each_ops
@given(
    num_tokens=st.integers(1, 6),
    size=st.integers(1, 100),
    scale=st.floats(0.01, 100),
    rounds_once=st.booleans(),
    activation=st.sampled_from(Activation),
)
@settings(max_examples=num_examples(60))
def test_norms_and_gates_equal_those_of_torch(
    make_ops: Callable[[], Ops],
    num_tokens: int,
    size: int,
    scale: float,
    rounds_once: bool,
    activation: Activation,
) -> None:
    # Columns of a wider tensor, as the queries of a token are.
    activations = (drawn(5, num_tokens, size + 3) * scale)[:, 2 : 2 + size]
    norm, gate = make_norm(size, rounds_once), MlpGate(activation, alpha=1.702, limit=7.0)
    gate_up = drawn(7, num_tokens, 2 * size) * scale
    ops = make_ops()

    assert is_near(ops.rms_norm(activations, norm), REFERENCE.rms_norm(activations, norm))
    found, wanted = ops.apply_gate(gate_up, gate), REFERENCE.apply_gate(gate_up, gate)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=2**-7 * scale)


@each_ops
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("num_tokens", [1, 3, 500])
def test_sums_equal_those_of_torch(
    make_ops: Callable[[], Ops], scale: float, num_tokens: int
) -> None:
    hidden_states, output = drawn(5, num_tokens, 70), drawn(6, num_tokens, 70)
    wanted = REFERENCE.add(hidden_states, output, scale)

    found = make_ops().add(hidden_states, output, scale)

    assert torch.equal(found, wanted)


@each_ops
@pytest.mark.parametrize("rounds_once", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_sum_and_its_norm_have_the_bits_of_both_operations(
    make_ops: Callable[[], Ops], scale: float, rounds_once: bool
) -> None:
    # Columns of wider tensors.
    hidden_states, output = (drawn(seed, 3, 75)[:, 2:72] for seed in (5, 6))
    ops, norm = make_ops(), make_norm(70, rounds_once)
    wanted = ops.add(hidden_states.clone(), output, scale)

    added, normed = ops.add_and_norm(hidden_states.clone(), output, scale, norm)

    assert torch.equal(added, wanted)
    assert torch.equal(normed, ops.rms_norm(wanted, norm))


@each_ops
def test_nan_stays_in_its_own_row(make_ops: Callable[[], Ops]) -> None:
    activations = drawn(8, 3, 64)
    activations[1, 5] = float("nan")
    ops = make_ops()
    plain = ops.linear(drawn(9, 70, 64), None)
    whole = ops.linear(to_int8(drawn(9, 70, 64)), None)
    gates = [MlpGate(activation, alpha=1.702, limit=7.0) for activation in Activation]
    fp4 = ops.linear(random_mxfp4(9, 70, 64), None)

    for answer in (
        plain(activations),
        whole(activations),
        *(ops.rms_norm(activations, make_norm(64, once)) for once in (False, True)),
        *(ops.apply_gate(activations, gate) for gate in gates),
        fp4(activations),
    ):
        assert answer.isnan().any(dim=1).tolist() == [False, True, False]


def test_the_best_build_is_the_first_that_the_processor_can_run() -> None:
    tiles, bf16, avx2, plain = VARIANTS

    assert best_variant(tiles.features | bf16.features) is tiles
    assert best_variant(tiles.features - {"amx_tile"}) is bf16  # the system keeps them to itself
    assert best_variant(bf16.features | {"more"}) is bf16
    assert best_variant(bf16.features | avx2.features) is bf16
    assert best_variant(avx2.features | {"avx512f"}) is avx2
    assert best_variant(frozenset()) is plain


def test_without_a_compiler_torch_computes_and_one_log_line_states_the_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_KERNELS", raising=False)

    parts = choose_parts("auto", torch.bfloat16, CPU)

    assert parts is TORCH
    assert [record.message for record in caplog.records if "compiler" in record.message]
    with pytest.raises(InvalidConfig, match="no C\\+\\+ compiler"):
        choose_parts("native", torch.bfloat16, CPU)


def test_a_prebuilt_library_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels_by_variant():
        pytest.skip("no compiler here")
    built = library(best_variant(cpu_features()))
    monkeypatch.setenv("BATON_KERNELS", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    with pytest.raises(KernelsUnavailable, match="cannot write the kernels"):
        library(best_variant(cpu_features()))

    (tmp_path / built.name).write_bytes(built.read_bytes())

    assert library(best_variant(cpu_features())).parent == tmp_path


def test_requesting_unsupported_kernels_by_name_is_refused() -> None:
    assert choose_parts("auto", torch.float32, CPU) is TORCH
    assert choose_parts("torch", torch.bfloat16, CPU) is TORCH
    with pytest.raises(InvalidConfig, match="bfloat16 on the CPU"):
        choose_parts("native", torch.float32, CPU)


def _with_threads(kernels: Kernels, num_threads: int) -> Kernels:
    return Kernels(kernels.path, num_threads)
