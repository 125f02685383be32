"""Operations of encoders in float32: torch and the native kernels against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.encoders.config import EncoderConfig, EncoderLayerConfig, Gelu
from baton.engine.runner.encoders.encoder import EncodingLayer, UnfusedEncoderLayer
from baton.engine.runner.encoders.native_encoder import (
    NativeEncoderOps,
    NativeLayer,
    native_layers,
    with_packed_layers,
)
from baton.engine.runner.encoders.ops import EncoderLayer, EncoderWeights, TorchEncoderOps
from baton.engine.runner.encoders.packed_texts import EqualTexts, PackedTexts, pack_texts
from baton.engine.runner.kernels.build import (
    KernelsUnavailable,
    best_variant,
    cpu_features,
    library,
)
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.model.layer_norm import LayerNorm
from baton.engine.runner.model.linear import TorchLinear
from tests.support.encoders import a_layer_norm

GROUPS = (EqualTexts(0, 3, 1), EqualTexts(3, 2, 7), EqualTexts(17, 1, 16), EqualTexts(33, 2, 41))
NUM_TOKENS = 115
HEADS, HEAD_DIM = 3, 20
SIZE = HEADS * HEAD_DIM


@pytest.fixture(scope="module", params=[1, 2])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return Kernels(library(best_variant(cpu_features())), request.param)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["torch", "native"])
def ops(request: pytest.FixtureRequest, kernels: Kernels) -> TorchEncoderOps:
    return TorchEncoderOps() if request.param == "torch" else NativeEncoderOps(kernels)


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_alone(qkv: Tensor, group: EqualTexts, index: int) -> Tensor:
    first = group.first + index * group.num_tokens
    text = qkv[first : first + group.num_tokens].double()
    query, key, value = text.view(group.num_tokens, 3, HEADS, HEAD_DIM).permute(1, 2, 0, 3)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(0, 1).reshape(-1, SIZE)


def test_attention_is_within_each_text(ops: TorchEncoderOps) -> None:
    qkv = drawn(NUM_TOKENS, 3 * SIZE)
    wanted = [
        attention_alone(qkv, group, index) for group in GROUPS for index in range(group.num_texts)
    ]

    found = ops.attend(qkv, HEADS, GROUPS, window=None)

    assert (found - torch.cat(wanted)).abs().max() < 1e-5


@pytest.mark.parametrize("kind", Gelu)
def test_gelu(ops: TorchEncoderOps, kind: Gelu) -> None:
    inputs = torch.linspace(-9, 9, 1003).view(17, 59)
    how = "none" if kind is Gelu.EXACT else "tanh"

    found = ops.gelu(inputs, kind)

    assert (found - functional.gelu(inputs.double(), approximate=how)).abs().max() < 1e-6
    assert ops.gelu(torch.tensor([[float("nan")]]), kind).isnan()


def packed(kernels: Kernels, num_rows: int, num_columns: int) -> tuple[TorchLinear, EncoderLayer]:
    plain = TorchLinear(drawn(num_rows, num_columns), drawn(num_rows, seed=2))
    unbiased = TorchLinear(plain.weight, None)
    norm = a_layer_norm(num_columns)
    layer = EncoderLayer(norm, plain, unbiased, norm, plain, plain)
    unused = object()
    weights = EncoderWeights(unused, [layer], None, None)  # type: ignore[arg-type]
    return plain, with_packed_layers(weights, kernels).layers[0]


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 3), (16, 384), (100, 64), (33, 257)])
@pytest.mark.parametrize("num_tokens", [1, 5, 6, 34, 301])
def test_packed_linear_layers(
    kernels: Kernels, num_rows: int, num_columns: int, num_tokens: int
) -> None:
    plain, layer = packed(kernels, num_rows, num_columns)
    inputs = drawn(num_tokens, num_columns, seed=3)
    wanted = inputs.double() @ plain.weight.double().T

    assert (layer.output(inputs) - wanted).abs().max() < 1e-4
    assert plain.bias is not None
    assert (layer.qkv(inputs) - wanted - plain.bias).abs().max() < 1e-4


ENCODER = EncoderConfig(
    architecture="BertModel",
    vocab_size=1,
    hidden_size=SIZE,
    num_heads=HEADS,
    mlp_size=130,
    max_text_len=64,
    num_positions=64,
    first_position=0,
    num_token_types=0,
    norm_epsilon=1e-12,
    layers=(EncoderLayerConfig(),),
    ropes=(),
    is_pre_norm=False,
    gelu=Gelu.EXACT,
    is_gated=False,
    has_attention_bias=True,
    has_mlp_bias=True,
    has_norm_bias=True,
    classifier=None,
    dtype="float32",
)


def layers(
    kernels: Kernels, dtype: torch.dtype, config: EncoderConfig
) -> tuple[EncodingLayer, EncodingLayer]:
    """Return a layer that calls torch's operations in this dtype, and the native one."""
    sizes = {
        "qkv": (3 * SIZE, SIZE),
        "output": (SIZE, SIZE),
        "up": (130, SIZE),
        "down": (SIZE, 130),
    }

    def weights(dtype: torch.dtype) -> EncoderLayer:
        linears = {
            name: TorchLinear((0.2 * drawn(*shape)).to(dtype), drawn(shape[0], seed=2).to(dtype))
            for name, shape in sizes.items()
        }
        norms = [
            LayerNorm(drawn(SIZE, seed=seed).to(dtype), drawn(SIZE, seed=9).to(dtype), 1e-12)
            for seed in (4, 5)
        ]
        return EncoderLayer(attention_norm=norms[0], mlp_norm=norms[1], **linears)

    plain = EncoderWeights(object(), [weights(torch.float32)], None, None)  # type: ignore[arg-type]
    [native] = native_layers(config, with_packed_layers(plain, kernels), kernels)
    return UnfusedEncoderLayer(config, 0, TorchEncoderOps(), weights(dtype)), native


def packed_texts(lens: Sequence[int]) -> PackedTexts:
    rows = [
        PlanRow(RequestId(str(index)), (0,) * size, size, 0, ((),), SamplingParams(), 0)
        for index, size in enumerate(lens)
    ]
    return pack_texts(rows)


@pytest.mark.parametrize("kind", Gelu)
def test_whole_layers(kernels: Kernels, kind: Gelu) -> None:
    config = replace(ENCODER, gelu=kind)
    wanted_of, native = layers(kernels, torch.float64, config)
    texts = packed_texts([1, 5, 7, 7, 12, 13, 25, 45])
    inputs = drawn(115, SIZE, seed=3)

    found = native(inputs.clone(), texts, None)

    assert isinstance(native, NativeLayer)
    assert (found - wanted_of(inputs.double(), texts, None)).abs().max() < 1e-5
    alone = native(inputs[-45:].clone(), packed_texts([45]), None)
    assert torch.equal(found[-45:], alone)


def test_layers_that_one_call_does_not_compute_call_operations(kernels: Kernels) -> None:
    for other in ({"is_pre_norm": True}, {"layers": (EncoderLayerConfig(window=8),)}):
        _, layer = layers(kernels, torch.float32, replace(ENCODER, **other))
        assert isinstance(layer, UnfusedEncoderLayer)


def test_a_token_has_the_same_bits_in_any_batch(kernels: Kernels) -> None:
    _, layer = packed(kernels, 3 * SIZE, 130)
    inputs = drawn(NUM_TOKENS, 130, seed=3)
    whole = layer.qkv(inputs)

    alone = torch.cat([layer.qkv(inputs[index : index + 1]) for index in range(NUM_TOKENS)])

    assert torch.equal(alone, whole)
    mixed = NativeEncoderOps(kernels).attend(whole, HEADS, GROUPS, None)
    last = GROUPS[-1]
    text = whole[last.end - last.num_tokens : last.end].contiguous()
    one = EqualTexts(0, 1, last.num_tokens)
    assert torch.equal(
        NativeEncoderOps(kernels).attend(text, HEADS, [one], None), mixed[-last.num_tokens :]
    )
