"""Products of weights of 4 and 6 bits and activations that are rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.kernels.build import VARIANTS as KERNEL_VARIANTS
from baton.engine.runner.kernels.build import best_variant, cpu_features
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.load import load_runner
from baton.engine.runner.weights.quantize import to_int8
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.models import VARIANTS, make_model_folder
from tests.support.random_mxfp4 import random_mxfp4
from tests.support.random_quantized import (
    centred,
    random_quantized,
    to_int4_zeros,
    with_offsets,
    with_steps,
)

FORMATS = [(4, 32), (4, 64), (4, 96), (4, 256), (6, 16), (6, 32), (6, 64), (6, 256)]
CPU = torch.device("cpu")
each_variant = pytest.mark.parametrize(
    "kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys()
)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(activations: Tensor, block: int) -> Tensor:
    """Return activations after rounding to 8 bits, by blocks with a common scale."""
    num_tokens, num_columns = activations.shape
    padded = torch.nn.functional.pad(activations.float(), (0, -num_columns % block))
    blocks = padded.view(num_tokens, -1, block)
    largest = blocks.abs().amax(dim=2, keepdim=True)
    # torch divides a number by a tensor with two roundings.
    factors = torch.full_like(largest, 127) / largest
    whole = torch.where(largest > 0, (blocks * factors).round(), 0)
    return (whole.double() * (largest / 127)).view(num_tokens, -1)[:, :num_columns]


def products(weight: Quantized, activations: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exact products with rounded activations, and a bound of the error."""
    exact = replace(weight, dtype=torch.float64).dequantize()
    states = rounded(activations, min(32, weight.group))
    wanted = states @ exact.T
    # Numbers and offsets are multiplied apart, and mostly cancel.
    parts = (
        (1 << weight.bits)
        * weight.scales.double().abs().amax()
        * states.abs().sum(dim=1, keepdim=True)
    )
    return wanted, parts * 2**-20 + wanted.abs() * 2**-8


@each_variant
@given(
    num_tokens=st.integers(1, 40),
    num_rows=st.integers(1, 200),
    num_columns=st.integers(1, 300),
    bits_and_group=st.sampled_from(FORMATS),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["zeros", "offsets", "centred", "steps", "steps of offsets", "mxfp4"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=num_examples(60))
def test_a_product_equals_that_of_rounded_activations(
    kernels: Kernels,
    num_tokens: int,
    num_rows: int,
    num_columns: int,
    bits_and_group: tuple[int, int],
    scale_dtype: torch.dtype,
    kind: str,
    seed: int,
) -> None:
    activations, bias = drawn(seed + 1, num_tokens, num_columns), drawn(seed + 2, num_rows)
    activations[0] *= 1000
    weight = random_quantized(seed, num_rows, num_columns, *bits_and_group, scale_dtype)
    if kind == "offsets":
        weight = with_offsets(weight)
    if kind == "centred":
        weight = centred(weight)
    if (kind, weight.group) == ("steps", 16):  # the kernels have no others without offsets
        weight = with_steps(weight, seed, has_offsets=False)
    if kind == "steps of offsets" and weight.group in (16, 32):
        weight = with_steps(weight, seed, has_offsets=True)
    if kind == "mxfp4":
        weight = random_mxfp4(seed, num_rows, num_columns)

    found = NativeOps(kernels, int8_activations=True).linear(weight, bias)(activations)

    wanted, bound = products(weight, activations)
    wanted += bias.double()
    assert ((found.double() - wanted).abs() <= bound + bias.double().abs() * 2**-8 + 1e-5).all()


@each_variant
@pytest.mark.parametrize("activation", [1.0, -1.0])
@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda: random_quantized(3, 70, 64, 4, 64), (0, 15)),
        (lambda: random_quantized(3, 70, 64, 6, 16), (0, 63)),
        (lambda: random_quantized(3, 70, 64, 6, 32), (0, 63)),
        (lambda: random_mxfp4(3, 70, 64), (7, 15)),  # codes of 6 and -6
    ],
    ids=["4 bits", "6 bits in groups of 16", "6 bits", "mxfp4"],
)
@pytest.mark.parametrize("at", [0, 1])
def test_sums_of_the_largest_products_are_exact(
    kernels: Kernels,
    make: Callable[[], Quantized],
    numbers: tuple[int, int],
    at: int,
    activation: float,
) -> None:
    weight = make()
    weight.scales.fill_(1)
    weight.zeros.fill_(0)
    weight.numbers.fill_(numbers[at])
    activations = torch.full((3, 64), activation, dtype=torch.bfloat16)

    found = NativeOps(kernels, int8_activations=True).linear(weight, None)(activations)

    wanted = activations.double() @ weight.dequantize().double().T
    assert torch.equal(found, wanted.bfloat16())


@each_variant
@pytest.mark.parametrize(
    "make",
    [
        to_int4_zeros,
        lambda weight: with_offsets(to_int4_zeros(weight)),
        lambda weight: random_quantized(5, len(weight), weight.shape[1], 4, 96, torch.float16),
        lambda weight: random_mxfp4(5, len(weight), weight.shape[1]),
        lambda weight: random_quantized(5, len(weight), weight.shape[1], 6, 16),
        lambda weight: with_offsets(random_quantized(5, len(weight), weight.shape[1], 6, 32)),
        lambda weight: centred(random_quantized(5, len(weight), weight.shape[1], 4, 32)),
        lambda weight: with_steps(
            random_quantized(5, len(weight), weight.shape[1], 4, 32), 7, has_offsets=True
        ),
        lambda weight: with_steps(
            random_quantized(5, len(weight), weight.shape[1], 6, 16), 7, has_offsets=False
        ),
    ],
    ids=[
        *("int4", "offsets", "groups of 96", "mxfp4", "6 bits in groups of 16", "6 bits"),
        *("centred", "steps of 4 bits", "steps of 6 bits"),
    ],
)
@pytest.mark.parametrize("num_tokens", [2, 3, 7, 31, 32, 33, 70])
def test_a_token_has_the_same_bits_in_any_batch(
    kernels: Kernels, make: Callable[[Tensor], Quantized], num_tokens: int
) -> None:
    activations, weight = drawn(1, num_tokens, 264), make(drawn(2, 300, 264))
    linear = NativeOps(kernels, int8_activations=True).linear(weight, None)
    one_thread = NativeOps(Kernels(kernels.path, 1), int8_activations=True).linear(weight, None)

    together = linear(activations)

    alone = [one_thread(activations[i : i + 1]) for i in range(num_tokens)]
    assert torch.equal(together, torch.cat(alone))


@each_variant
def test_a_non_finite_activation_stays_in_its_own_row(kernels: Kernels) -> None:
    activations = drawn(8, 4, 64)
    activations[1, 5], activations[2, 40] = torch.nan, torch.inf
    for weight in (to_int4_zeros(drawn(9, 70, 64)), random_mxfp4(9, 70, 64)):
        answer = NativeOps(kernels, int8_activations=True).linear(weight, None)(activations)

        is_finite = answer.isfinite()
        assert is_finite.all(dim=1).tolist() == [True, False, False, True]
        assert not is_finite[1:3].any()


@each_variant
def test_activations_of_zero_give_the_bias(kernels: Kernels) -> None:
    bias = drawn(2, 70)
    linear = NativeOps(kernels, int8_activations=True).linear(to_int4_zeros(drawn(1, 70, 64)), bias)

    found = linear(torch.zeros(2, 64, dtype=torch.bfloat16))

    assert torch.equal(found, bias.expand(2, 70))


@each_variant
@pytest.mark.parametrize(
    "make",
    [
        lambda: drawn(1, 70, 128),
        lambda: to_int8(drawn(1, 70, 128)),
        lambda: random_quantized(1, 70, 128, 8, 32),
        lambda: random_quantized(1, 70, 128, 4, 24),
        lambda: random_quantized(1, 70, 128, 4, 16),
        lambda: random_quantized(1, 70, 128, 6, 24),
    ],
    ids=["bfloat16", "int8", "8 in 32", "4 in 24", "4 in 16", "6 in 24"],
)
def test_other_weights_multiply_exact_activations(
    kernels: Kernels, make: Callable[[], Tensor | Quantized]
) -> None:
    weight, activations = make(), drawn(2, 3, 128)
    found, wanted = (
        NativeOps(kernels, int8_activations=is_int8).linear(weight, None)(activations)
        for is_int8 in (True, False)
    )

    assert torch.equal(found, wanted)


@each_variant
def test_rows_are_those_of_exact_activations(kernels: Kernels) -> None:
    """Covers embedding tables."""
    row_ids = torch.tensor([149, 0, 64, 63, 64])
    weights = to_int4_zeros(drawn(1, 150, 96)), random_mxfp4(1, 150, 96)
    sixes, fours = random_quantized(1, 150, 96, 6, 16), random_quantized(1, 150, 544, 4, 32)
    changed = (
        *(centred(sixes), with_steps(sixes, 2, has_offsets=False)),
        *(centred(fours), with_steps(fours, 2, has_offsets=True)),
    )
    for weight in (*weights, sixes, *changed):
        rows = NativeOps(kernels, int8_activations=True).linear(weight, None).rows(row_ids)

        assert torch.equal(rows, weight.dequantize()[row_ids])


def test_a_node_with_int8_activations_has_its_own_fingerprint(tmp_path: Path) -> None:
    make_model_folder(tmp_path, replace(VARIANTS["llama"], dtype="bfloat16"))
    fingerprints = set()
    for activation_dtype in ("bfloat16", "int8"):
        config = RunnerConfig(
            str(tmp_path),
            kv_cache_bytes=1 << 20,
            quantize="int4",
            activation_dtype=activation_dtype,
        )
        with load_runner(config) as runner:
            fingerprints.add(runner.info.fingerprint)

    assert len(fingerprints) == 2


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", torch.bfloat16), ("auto", torch.float32)])
def test_int8_activations_without_native_kernels_are_refused(
    kernels: str, dtype: torch.dtype
) -> None:
    with pytest.raises(InvalidConfig, match="--activation-dtype int8 needs the native kernels"):
        choose_parts(kernels, dtype, CPU, activation_dtype="int8")


@pytest.mark.parametrize("activation_dtype", ["auto", "bfloat16", "int8"])
def test_activations_are_rounded_by_default_where_there_are_no_tiles(activation_dtype: str) -> None:
    has_tiles = best_variant(cpu_features()).has_tiles
    rounds = {"auto": not has_tiles, "bfloat16": False, "int8": True}

    packer = choose_parts("native", torch.bfloat16, CPU, activation_dtype=activation_dtype).packer

    assert packer is not None
    packed = packer.pack(to_int4_zeros(drawn(1, 64, 64)))
    assert packed.fields["activation_bits"] == (8 if rounds[activation_dtype] else 16)


def test_only_amx_multiplies_tiles() -> None:
    assert [variant.name for variant in KERNEL_VARIANTS if variant.has_tiles] == ["amx"]


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="'int4': choose one of auto, bfloat16, int8"):
        RunnerConfig("model", activation_dtype="int4")
