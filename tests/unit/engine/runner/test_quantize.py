"""Rounding to 4 bits: error by group, importance of columns, range and determinism."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.weights.quantize import GROUP, to_int4, to_int6
from tests.support.hypothesis_profiles import num_examples
from tests.support.random_quantized import to_int4_zeros

SIZES = st.integers(1, 100)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def restored(matrix: Quantized) -> Tensor:
    return replace(matrix, dtype=torch.float32).dequantize()


def by_group(rows: Tensor) -> Tensor:
    """Return rows as [rows, groups, columns of a group], padded with zeros."""
    padded = functional.pad(rows, (0, -rows.shape[-1] % GROUP))
    return padded.view(*rows.shape[:-1], -1, GROUP)


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Draw matrices with outliers, constant and zero groups, and ragged last groups."""
    seed, rows, columns = draw(st.integers(0, 2**32)), draw(st.integers(1, 12)), draw(SIZES)
    weight = drawn(seed, rows, columns)
    weight *= drawn(seed + 1, columns).mul(draw(st.sampled_from([0, 2]))).exp()
    weight = (weight + draw(st.sampled_from([0.0, 3.0, -3.0]))) * 10.0 ** draw(st.integers(-6, 4))
    weight[draw(st.integers(0, rows - 1))] = draw(st.sampled_from([0.0, 0.7, -1e-3]))
    return weight.bfloat16()


@given(weight=matrices(), seed=st.integers(0, 2**32))
@settings(max_examples=num_examples(60), deadline=None)
def test_a_weighted_error_is_at_most_that_of_half_a_step(weight: Tensor, seed: int) -> None:
    importance = drawn(seed, weight.shape[1]).mul(2).exp()

    quantized = to_int4(weight, importance)

    assert quantized.numbers.max() <= 15
    grouped = by_group(weight.float())
    lowest, highest = grouped.amin(-1), grouped.amax(-1)
    # Half a step, and the rounding of scale and offset to multiples of a step of the row.
    largest = torch.maximum((highest - lowest).amax(-1), weight.float().abs().amax(-1))[:, None]
    bound = (highest - lowest) / 15 * 0.53 + largest / 120 + 2**-20
    # Columns of little importance are rounded with at least a thousandth of the mean.
    relative = by_group((importance / importance.mean()).clamp_min(1e-3))
    error = by_group(weight.float() - restored(quantized)).square().mul(relative).sum(-1)
    assert (error <= relative.sum(-1) * bound.square() + 1e-30).all()


def test_zeros_are_exact_and_equal_weights_nearly() -> None:
    weight = torch.zeros(3, 64)
    weight[1], weight[2, 32:] = 0.75, -3.0

    for importance in torch.rand(100, 64, generator=torch.Generator().manual_seed(1)):
        torch.testing.assert_close(restored(to_int4(weight, importance)), weight, rtol=2e-3, atol=0)


def test_rows_of_small_weights_keep_their_precision() -> None:
    weight = drawn(1, 4, 512)

    losses = [
        (restored(to_int4(weight * size)) / size - weight).square().mean() for size in (1, 1e-3)
    ]

    assert losses[1] < losses[0] * 1.02


def test_scales_and_offsets_are_multiples_of_their_steps() -> None:
    quantized = to_int4(drawn(2, 5, 600))

    assert quantized.scale_steps is not None
    assert quantized.offset_steps is not None
    assert quantized.offsets is not None
    for values, steps in (
        (quantized.scales, quantized.scale_steps),
        (quantized.offsets, quantized.offset_steps),
    ):
        multiples = values / steps.float().repeat_interleave(8, dim=1)[:, : values.shape[1]]
        torch.testing.assert_close(multiples, multiples.round(), rtol=0, atol=1e-4)
        assert multiples.abs().max() <= 127


def test_six_bits_lose_a_tenth_of_what_four_bits_lose() -> None:
    weight = drawn(3, 64, 500).bfloat16()

    four, six = (restored(each(weight)) - weight.float() for each in (to_int4, to_int6))

    assert six.square().mean() < four.square().mean() / 10


@pytest.mark.parametrize("num_inputs", [0, 32])
def test_columns_without_any_inputs_are_rounded_alike(num_inputs: int) -> None:
    weight, importance = drawn(2, 3, 64), torch.zeros(64)
    importance[:num_inputs] = 1

    found = restored(to_int4(weight, importance))

    assert torch.equal(found, restored(to_int4(weight, torch.ones(64))))


def test_important_columns_are_rounded_more_exactly() -> None:
    weight = drawn(3, 64, 512).bfloat16()
    importance = torch.ones(512)
    importance[7::32] = 1000

    plain, weighted = restored(to_int4(weight)), restored(to_int4(weight, importance))

    error = (plain - weight.float()).square(), (weighted - weight.float()).square()
    assert error[1][:, 7::32].mean() < error[0][:, 7::32].mean() / 50
    assert error[1].mean() < error[0].mean() * 1.3


def test_a_fitted_line_loses_less_than_the_whole_range() -> None:
    weight = drawn(3, 64, 512).bfloat16()

    whole_range, fitted = to_int4_zeros(weight), to_int4(weight)

    losses = [(restored(each) - weight.float()).square().mean() for each in (whole_range, fitted)]
    assert losses[1] < losses[0] * 0.85


def test_columns_are_equally_important_by_default() -> None:
    weight = drawn(3, 64, 90).bfloat16()

    assert torch.equal(restored(to_int4(weight)), restored(to_int4(weight, torch.full((90,), 7.0))))


def test_transposed_matrices_are_rounded_alike() -> None:
    weight = drawn(3, 96, 64).bfloat16()

    assert torch.equal(restored(to_int4(weight.T)), restored(to_int4(weight.T.contiguous())))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_spoil_the_groups_of_their_step_only(wrong: float) -> None:
    weight, importance = drawn(4, 4, 600), torch.rand(600)
    good = restored(to_int4(weight, importance))
    weight[1, 300] = wrong

    found = restored(to_int4(weight, importance))

    spoiled = torch.zeros(4, 600, dtype=torch.bool)
    spoiled[1, 256:512] = True
    assert torch.equal(found[~spoiled], good[~spoiled])
    assert not found[spoiled].isfinite().any()


def test_the_rounding_depends_on_neither_threads_nor_other_rows() -> None:
    weight, importance = drawn(5, 700, 1000).bfloat16(), drawn(6, 1000).exp()
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append(restored(to_int4(weight, importance)))
    finally:
        torch.set_num_threads(before)

    assert torch.equal(*results)
    assert torch.equal(results[0][100:300], restored(to_int4(weight[100:300], importance)))
