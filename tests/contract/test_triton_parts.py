"""Triton parts: where they are refused, and bits that do not depend on the batch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.checkpoint.quantized import Quantized
from baton.core.errors import InvalidConfig
from baton.engine.runner.attention.byte_kv import dequantize, scale_bytes
from baton.engine.runner.attention.paged_attention import (
    LayerAttention,
    PagedAttention,
    TorchPagedAttention,
)
from baton.engine.runner.device.step_inputs import PackedInputs
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.model.config import MoeConfig
from baton.engine.runner.model.linear import ExpertChoice, Mlp, Moe, Router
from baton.engine.runner.model.ops import MlpGate, Norm, Ops
from baton.engine.runner.model.pass_layout import empty_layout
from baton.engine.runner.triton import availability
from baton.engine.runner.triton.availability import INTERPRETER_VARIABLE
from tests.support.attention_world import Part, Shape, World
from tests.support.fake_device import FakeDevice
from tests.support.random_mxfp4 import random_mxfp4
from tests.support.random_quantized import random_quantized, with_offsets
from tests.support.triton_parts import (
    batch_invariant_ops,
    batch_invariant_parts,
    interpreted_parts,
    kernels_on_copies,
    launched_kernels,
    require_triton,
    triton_attention,
    triton_ops,
)

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Contexts that end before, at and after the end of a segment, and a chunk across one.
LONG = [Part(790, 1), Part(255, 1), Part(256, 1), Part(0, 1), Part(510, 3)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def test_triton_kernels_without_the_package_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "find_spec", lambda name: None)

    with pytest.raises(InvalidConfig, match=r"pip install 'baton\[gpu\]'"):
        choose_parts("triton", torch.float32, CPU)


def test_triton_kernels_on_a_cpu_without_the_interpreter_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_triton()
    monkeypatch.delenv(INTERPRETER_VARIABLE)

    with pytest.raises(InvalidConfig, match=f"--device cuda.*{INTERPRETER_VARIABLE}=1"):
        choose_parts("triton", torch.float32, CPU)


def test_triton_kernels_with_int8_activations_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="--activation-dtype int8 needs the native kernels"):
        choose_parts("triton", torch.bfloat16, CPU, activation_dtype="int8")


def test_triton_is_imported_only_if_it_is_chosen() -> None:
    program = (
        "import sys, torch; from baton.engine.runner.kernels.choose import choose_parts; "
        "choose_parts('torch', torch.float32, torch.device('cpu')); "
        "assert not [name for name in sys.modules if name.split('.')[0] == 'triton']"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_has_the_same_bits_in_a_chunk_in_a_batch_and_alone(dtype: torch.dtype) -> None:
    # Tiles of 5 tokens: their boundaries differ between the passes. Blocks before windows are NaN.
    shape = Shape(num_heads=6, windows=(9, 20), softcap=30.0, has_sinks=True, dtype=dtype)
    world = World(shape, [Part(37, 1), Part(70, 1), Part(0, 13), Part(29, 12)], seed=6)
    together = world.attend(triton_attention)
    for layer, outputs in enumerate(together):
        assert torch.allclose(outputs.double(), world.expected(layer), atol=TOLERANCE[dtype])

    layout = world.layout()
    last = torch.from_numpy(layout.last_token_indices(np.arange(4)))
    for sequences in (np.arange(4), np.array([3]), np.array([2]), np.array([1])):
        layers = [world.attention(layer) for layer in range(2)]
        ends = layout.restrict_to_last_tokens(sequences)
        decodes = triton_attention(world.kv, layers).begin(ends)
        for layer, outputs in enumerate(together):
            tokens = last[torch.from_numpy(sequences)]
            assert torch.equal(decodes.attend(layer, world.queries[layer][tokens]), outputs[tokens])


SPECIAL_ROWS = torch.tensor(
    [
        [0.0] * 16,
        [math.inf, *[1.0] * 15],
        [-1.0, math.nan, *[2.0] * 14],
        [3.0e38, -1.0e-38, *[1.0e36] * 14],
        [127.0, 0.5, 1.5, -2.5, -126.5, *[0.25] * 11],  # ties
        [1.0e-40, *[3.0e-41] * 15],
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_write_kernel_quantises_with_the_bits_of_torch(dtype: torch.dtype) -> None:
    shape = replace(ONE_LAYER, num_kv_heads=2, dtype=dtype, kv_dtype=torch.int8)
    world = World(shape, [Part(3, 9)], seed=3)
    key, value = world.fresh(0)
    key = key.clone()
    key[: len(SPECIAL_ROWS), 1] = SPECIAL_ROWS.to(dtype)
    reference = world.kv.clone()

    for make, kv in ((triton_attention, world.kv), (TorchPagedAttention, reference)):
        make(kv, [world.attention(0)]).begin(world.layout()).write(0, key, value)

    size = world.kv.shape[-1] - scale_bytes(torch.int8)
    assert torch.equal(world.kv[..., :size], reference[..., :size])
    written, expected = (dequantize(kv, torch.float32) for kv in (world.kv, reference))
    assert torch.allclose(written, expected, rtol=0, atol=0, equal_nan=True)


ONE_LAYER = Shape(num_heads=2, num_kv_heads=1, num_layers=1, windows=(None,), chunks=(None,))
SPLIT_SHAPES = {
    "window": replace(ONE_LAYER, windows=(400,), softcap=30.0, has_sinks=True),
    "chunk": replace(ONE_LAYER, chunks=(300,), dtype=torch.bfloat16),
    "int8": replace(
        ONE_LAYER, num_heads=6, num_kv_heads=2, dtype=torch.bfloat16, kv_dtype=torch.int8
    ),
    "latent": replace(ONE_LAYER, head_dim=40, value_dim=32, dtype=torch.float16),
    "many heads": replace(ONE_LAYER, num_heads=20),
}


@pytest.mark.parametrize(
    ("name", "sequences"),
    [
        ("window", [Part(530, 1), Part(0, 3)]),
        *(pytest.param(each, LONG, marks=pytest.mark.triton) for each in SPLIT_SHAPES),
    ],
)
def test_attention_has_the_same_bits_whether_its_context_is_split_or_not(
    name: str, sequences: list[Part]
) -> None:
    worlds = [World(SPLIT_SHAPES[name], sequences, seed=7) for _ in range(2)]

    split, whole = (
        world.attend(partial(attention_with, num_processors))
        for world, num_processors in zip(worlds, (132, 1), strict=True)
    )

    assert torch.equal(split[0], whole[0])
    tolerance = TOLERANCE[worlds[0].shape.dtype]
    assert torch.allclose(split[0].double(), worlds[0].expected(0), atol=tolerance)


def attention_with(
    num_processors: int, kv: Tensor, layers: Sequence[LayerAttention]
) -> PagedAttention:
    """Return the attention of a GPU with so many processors: few of them do not split it."""
    require_triton()
    interpreted_parts()  # corrects the interpreter
    from baton.engine.runner.triton.attention.triton_attention import TritonPagedAttention

    return TritonPagedAttention(kv, layers, num_processors)


def test_kernels_on_copies_change_the_tensors_that_they_are_given() -> None:
    """As on a GPU, whose kernels cannot read the memory of the CPU."""
    require_triton()
    world = World(ONE_LAYER, [Part(5, 1), Part(0, 3)], seed=9)
    wide, bits = drawn(4, 40), []
    with launched_kernels() as launched, kernels_on_copies(CPU):
        outputs = world.attend(triton_attention)[0]
        bits.append(triton_ops().add(wide[:, 3:20], wide[:, 20:37], 1.0))

    assert torch.allclose(outputs.double(), world.expected(0), atol=TOLERANCE[torch.float32])
    assert torch.equal(bits[0], wide[:, 3:20] + wide[:, 20:37])
    assert launched == ["write_kernel", "attention_kernel", "add_kernel"]


def test_a_decode_sends_32_bits_for_each_block_and_no_slots() -> None:
    """Kernels find the slots of new keys and values by block tables and positions."""
    kv = torch.zeros(1, 1, 2, 2, 16, 8)
    attention = triton_attention(kv, [LayerAttention(8**-0.5)])
    layout = empty_layout(2).pad(num_rows=64, num_blocks=256, scratch_block=0)
    with FakeDevice() as device:
        inputs = PackedInputs(device)
        inputs.begin()

        attention.begin(layout, inputs)

    tables, query_starts, context_lens = 4 * 2 * 64 * 256, 4 * 65, 4 * 64
    assert inputs.num_packed_bytes == tables + query_starts + context_lens + 12  # aligned to 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_in_a_batch_and_alone(dtype: torch.dtype) -> None:
    ops, rows = triton_ops(), drawn(7, 130).to(dtype)
    norm, heads = Norm(drawn(1, 130)[0].to(dtype), 1e-6), rows[:, None, :]
    angles = drawn(7, 1, 130).to(dtype), drawn(7, 1, 130).to(dtype)

    normed, rotated = ops.rms_norm(rows, norm), ops.apply_rope(heads, norm, angles)

    for row in range(7):
        one = slice(row, row + 1)
        assert torch.equal(normed[one], ops.rms_norm(rows[one], norm))
        cos, sin = (each[one] for each in angles)
        assert torch.equal(rotated[one], ops.apply_rope(heads[one], norm, (cos, sin)))


FORMATS = {
    "zeros": random_quantized(1, 70, 96, 4, 32, torch.bfloat16),
    "offsets": with_offsets(random_quantized(2, 70, 96, 4, 16, torch.float16)),
    "rows": random_quantized(3, 70, 300, 8, 300),
    "mxfp4": random_mxfp4(4, 70, 96),
}


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS.keys())
def test_products_have_the_same_bits_in_a_batch_and_alone(
    weight: Quantized, dtype: torch.dtype
) -> None:
    """Batches of more than 16 tokens use another tile."""
    linear = triton_ops().linear(weight, drawn(70).to(dtype))
    tokens = drawn(41, weight.numbers.shape[1]).to(dtype)

    together = linear(tokens)

    for part in (slice(40, 41), slice(3, 10), slice(24, 40), slice(9, 26)):
        assert torch.equal(linear(tokens[part]), together[part])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.triton)]
)
def test_plain_products_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    dtype: torch.dtype,
) -> None:
    """Batches of more than 16 tokens use another tile. No size is a multiple of one."""
    ops, tokens = batch_invariant_ops(), drawn(41, 130).to(dtype)
    linear = ops.linear(drawn(33, 130).to(dtype), drawn(33).to(dtype))
    by_head = ops.head_linears(drawn(2, 33, 65).to(dtype))

    together, heads_together = linear(tokens), by_head(tokens.view(41, 2, 65))

    for size, rows in ((1, slice(39, 41)), (9, slice(23, 41)), (18, slice(9, 27))):
        parts = tokens[rows].split(size)
        assert torch.equal(torch.cat([linear(part) for part in parts]), together[rows])
        heads = [by_head(part.view(-1, 2, 65)) for part in parts]
        assert torch.equal(torch.cat(heads), heads_together[rows])


def test_routing_has_the_same_bits_in_a_batch_and_alone() -> None:
    config = MoeConfig(21, 4, 48, normalizes=True, num_groups=3, top_groups=2)
    router = Router(config, drawn(21, 70), None, drawn(21))
    ops, tokens = batch_invariant_ops(), drawn(5, 70).bfloat16()

    together = ops.route(tokens, router)

    for part in (slice(4, 5), slice(1, 3)):
        for one, all_ in zip(ops.route(tokens[part], router), together, strict=True):
            assert torch.equal(one, all_[part])


def test_batch_invariant_attention_does_not_split_contexts() -> None:
    """A split depends on the tiles of the batch."""
    require_triton()
    layers = [LayerAttention(1.0)]
    names = []
    for parts in (interpreted_parts(), batch_invariant_parts()):
        world = World(ONE_LAYER, [Part(530, 1)], seed=8)
        with launched_kernels() as launched:
            parts.make_attention(world.kv, layers).begin(world.layout()).attend(0, world.queries[0])
        names.append(launched)

    assert names == [["segments_kernel", "merge_kernel"], ["attention_kernel"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("weight", FORMATS.values(), ids=FORMATS.keys())
def test_products_of_other_dtypes_equal_float64(weight: Quantized, dtype: torch.dtype) -> None:
    weight = replace(weight, dtype=dtype)
    tokens = drawn(3, weight.numbers.shape[1]).to(dtype)

    linear = triton_ops().linear(weight, None)

    exact = weight.dequantize()
    wanted = tokens.double() @ exact.double().T
    tolerance = TOLERANCE[dtype] * wanted.abs().max().item()
    assert torch.allclose(linear(tokens).double(), wanted, rtol=0, atol=tolerance)
    assert torch.equal(linear.rows(torch.tensor([69, 0])), exact[[69, 0]])


def test_rows_of_a_matrix_with_reordered_columns_are_in_the_order_of_activations() -> None:
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    weight = replace(FORMATS["zeros"], order=order)

    rows = triton_ops().linear(weight, None).rows(torch.tensor([3, 69]))

    assert torch.equal(rows, weight.dequantize()[[3, 69]])


@pytest.mark.triton
@pytest.mark.parametrize("is_quantized", [False, True])
def test_experts_have_the_same_bits_in_a_batch_and_alone(is_quantized: bool) -> None:
    """In the batch an expert has 41 tokens, others have none, and tiles are larger."""
    ops = triton_ops()
    weights = [random_quantized(seed, 96, 64, 4, 32) for seed in range(6)]
    gate_up_bias, down_bias = drawn(96).bfloat16(), drawn(64).bfloat16()
    experts = []
    for index, weight in enumerate(weights):
        gate_up = ops.linear(weight if is_quantized else weight.dequantize(), gate_up_bias)
        experts.append(Mlp(gate_up, ops.linear(drawn(64, 48).bfloat16() + index, down_bias)))
    moe = make_moe(experts)
    tokens = drawn(82, 64).bfloat16()
    expert_ids = torch.stack([torch.full((82,), 2), torch.arange(82) % 2 * 5], dim=1)
    routing = ExpertChoice(expert_ids, drawn(82, 2).abs())

    together = ops.mix_experts(moe, MlpGate(), tokens, routing)

    for part in (slice(81, 82), slice(3, 12), slice(40, 80)):
        choice = ExpertChoice(*(each[part] for each in routing))
        assert torch.equal(ops.mix_experts(moe, MlpGate(), tokens[part], choice), together[part])


@pytest.mark.triton
def test_experts_of_different_formats_are_computed_one_by_one() -> None:
    hidden_states, gate = drawn(3, 96), MlpGate()
    routing = ExpertChoice(torch.tensor([[0, 1], [1, 0], [1, 1]]), drawn(3, 2).abs())
    formats = [
        random_quantized(1, 64, 96, 4, 32),
        random_quantized(2, 64, 96, 8, 96),
    ]

    def mixture(ops: Ops) -> Moe:
        matrices = [replace(each, dtype=torch.float32) for each in formats]
        down = ops.linear(drawn(96, 32), None)
        return make_moe([Mlp(ops.linear(each, None), down) for each in matrices])

    found, wanted = (
        ops.mix_experts(mixture(ops), gate, hidden_states, routing) for ops in (triton_ops(), Ops())
    )

    assert torch.allclose(found, wanted, rtol=0, atol=1e-5 * wanted.abs().max().item())
    assert interpreted_parts().waits_for_experts(mixture(triton_ops()))


def make_moe(experts: list[Mlp]) -> Moe:
    config = MoeConfig(len(experts), 2, 48)
    return Moe(config, Router(config, torch.zeros(0), None, None), experts, None, None)
