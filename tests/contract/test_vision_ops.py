"""Native operations of vision towers equal torch's, in each variant of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.vision.config import TowerActivation
from baton.engine.runner.vision.native_ops import NativeVisionOps
from baton.engine.runner.vision.ops import TorchVisionOps
from tests.support.kernels import kernels_by_variant

REFERENCE = TorchVisionOps()
ROUNDING = 2**-7  # of two numbers next to each other in bfloat16


@pytest.fixture(params=kernels_by_variant() or [pytest.param("", marks=pytest.mark.skip)])
def ops(request: pytest.FixtureRequest) -> TorchVisionOps:
    return NativeVisionOps(NativeOps(kernels_by_variant()[request.param]))


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = ROUNDING) -> None:
    assert found.dtype == torch.bfloat16
    assert found.shape == wanted.shape
    assert ((found.float() - wanted).abs() <= tolerance * (wanted.abs() + 0.1)).all()


@pytest.mark.parametrize("size", [16, 768, 30])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms(ops: TorchVisionOps, size: int, has_bias: bool) -> None:
    norm = LayerNorm(drawn(size), drawn(size, seed=2) if has_bias else None, 1e-6)
    inputs = (3 * drawn(7, size, seed=3) + 2).bfloat16()
    assert_close(ops.norm(inputs, norm), REFERENCE.norm(inputs.float(), norm))


def test_rms_norms(ops: TorchVisionOps) -> None:
    norm = Norm(drawn(80).bfloat16(), 1e-6)
    inputs = drawn(7, 80, seed=3).bfloat16()
    assert_close(ops.norm(inputs, norm), REFERENCE.norm(inputs, norm).float())


@pytest.mark.parametrize("activation", TowerActivation)
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("size", [32, 22])
def test_activations(
    ops: TorchVisionOps, activation: TowerActivation, is_gated: bool, size: int
) -> None:
    inputs = (4 * drawn(9, size)).bfloat16()
    wanted = REFERENCE.activate(inputs.float(), activation, is_gated=is_gated)
    found = ops.activate(inputs.clone(), activation, is_gated=is_gated)
    assert_close(found, wanted, 2 * ROUNDING)


@pytest.mark.parametrize("lens", [(1,), (64, 64, 48, 7), (300,), (513, 1)])
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("is_rotated", [True, False])
def test_patches_attend_to_their_window(
    ops: TorchVisionOps, lens: Sequence[int], head_dim: int, is_rotated: bool
) -> None:
    qkv = drawn(sum(lens), 3 * 2 * head_dim).bfloat16()
    turns = drawn(sum(lens), 1, head_dim // 2).repeat(1, 1, 2)
    angles = (turns.cos().bfloat16(), turns.sin().bfloat16()) if is_rotated else None
    floats = None if angles is None else (angles[0].float(), angles[1].float())
    wanted = REFERENCE.attend(qkv.float(), 2, lens, floats)
    found = ops.attend(qkv, 2, lens, angles)
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() < 0.03


@pytest.fixture
def integers() -> NativeOps:
    if "avx2" not in kernels_by_variant():
        pytest.skip("these kernels need AVX2")
    return NativeOps(kernels_by_variant()["avx2"], as_integers=True)


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "columns"), [(1, 1, 2), (5, 70, 96), (13, 64, 128), (400, 130, 330)]
)
def test_products_of_integers_are_as_exact_as_those_of_bfloat16(
    integers: NativeOps, num_tokens: int, num_rows: int, columns: int
) -> None:
    inputs, weight = drawn(num_tokens, columns).bfloat16(), drawn(num_rows, columns, seed=2)
    inputs[:, 0] *= 30  # as some columns of towers
    weight, bias = weight.bfloat16(), drawn(num_rows, seed=3).bfloat16()
    exact = inputs.double() @ weight.double().T + bias.double()

    linear = integers.linear(weight, bias)
    found = linear(inputs)

    rounding = (exact.bfloat16().double() - exact).norm()
    assert (found.double() - exact).norm() <= 1.2 * rounding + 1e-3
    for first, end in ((0, 1), (num_tokens // 2, num_tokens), (num_tokens // 3, num_tokens)):
        assert torch.equal(linear(inputs[first:end]), found[first:end])


def test_a_product_of_integers_is_not_finite_where_its_token_is_not(integers: NativeOps) -> None:
    inputs, weight = drawn(4, 300).bfloat16(), drawn(70, 300, seed=2).bfloat16()
    linear = integers.linear(weight, None)
    wanted = linear(inputs)
    inputs[1, 3], inputs[2, 299] = float("nan"), float("-inf")

    found = linear(inputs)

    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]
    assert torch.equal(found[[0, 3]], wanted[[0, 3]])
    assert not found[1:3].isfinite().any()
