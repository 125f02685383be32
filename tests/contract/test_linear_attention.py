"""Recurrent layers: exact up to one rounding, with bits that are always the same."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow, StateBlocks, StateSnapshot
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_linear_attention import NativeLinearAttention
from baton.engine.runner.model.config import Recurrence, RecurrentConfig
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.model.recurrent.gated_delta import GatedDelta, KimiDelta
from baton.engine.runner.model.recurrent.mamba2 import Mamba2
from baton.engine.runner.model.recurrent.matrix_rule import MatrixRule
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.short_conv import ShortConv
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.state.linear_attention import LinearAttention, TorchLinearAttention
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import StateTables
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.triton_parts import triton_linear_attention

each_build = pytest.mark.parametrize(
    "kernels", kernels_by_variant().values(), ids=kernels_by_variant().keys()
)
each_rule = pytest.mark.parametrize("rule", Recurrence, ids=lambda rule: rule.name.lower())

LAYER = 1  # of two
WORKSPACE_BYTES = 8 << 20
MakeAttention = Callable[[Tensor, StateShape], LinearAttention]
NO_TOKENS = np.zeros(0, dtype=np.int64)
Cut = Callable[[int], int]  # from remaining tokens to tokens of the next pass


class Outcome(NamedTuple):
    outputs: list[Tensor]  # by sequence
    states: list[Tensor]  # rows of the layer
    snapshots: list[Tensor]
    is_nan: Tensor  # of all blocks as float32


def random_weights(
    config: RecurrentConfig, dtype: torch.dtype, drawn: Callable[..., Tensor]
) -> RecurrentRule:
    gates, num_heads = Ops().linear(drawn(2, 2), None), config.num_value_heads
    conv = drawn(config.conv_size, config.num_channels).bfloat16().float()
    if config.rule is Recurrence.SHORT_CONV:
        return ShortConv(gates, conv)
    decay_bias, decay_rate = drawn(num_heads * config.num_decays), drawn(num_heads).exp()
    is_delta = config.rule in (Recurrence.GATED_DELTA, Recurrence.KIMI_DELTA)
    norm_size = config.value_dim if is_delta else config.num_values
    norm = Norm((1 + 0.2 * drawn(norm_size)).to(dtype), 1e-6)
    if is_delta:
        rule = KimiDelta if config.rule is Recurrence.KIMI_DELTA else GatedDelta
        return rule(gates, conv, decay_rate, norm, decay_bias, config.strength_scale)
    conv_bias, skip = drawn(config.num_channels), drawn(num_heads)
    own_norm = norm if config.has_norm else None
    return Mamba2(gates, conv, decay_rate, own_norm, conv_bias, decay_bias, skip)


def with_rule(config: RecurrentConfig, rule: Recurrence) -> RecurrentConfig:
    if rule is Recurrence.SHORT_CONV:
        config = replace(config, num_key_heads=1, num_value_heads=1, key_dim=0)
    return replace(config, rule=rule)


class RandomSequences:
    """Projected tokens of some sequences, whose states are in a cache of NaN."""

    def __init__(
        self,
        config: RecurrentConfig,
        lengths: Sequence[int],
        block_bytes: int,
        seed: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        name = str(dtype).removeprefix("torch.")
        self.config = config
        self.shape = StateShape(config, 2, name, dtype.itemsize, block_bytes)
        self._lengths = lengths
        width = config.num_channels + config.num_values
        self._projected = [drawn(n, width).to(dtype) for n in lengths]
        if config.rule is Recurrence.SHORT_CONV:  # their products are exact
            for each in self._projected:
                each[:, : config.num_values] = drawn(len(each), config.num_values).round().exp2()
        _, gate_rows = RULES[config.rule].stored_rows(config)
        self._gates = [drawn(n, len(gate_rows)).to(dtype) for n in lengths]
        self.weights = random_weights(config, dtype, drawn)
        ids = torch.randperm(3 * len(lengths) * self.shape.num_blocks, generator=generator)
        self._blocks = ids.view(len(lengths), 3, -1)

    def mixed(self, make: MakeAttention, cut: Cut, snapshot_at: int = 0) -> Outcome:
        shape, count = self.shape, len(self._lengths)
        bits = torch.full((3 * count * shape.num_blocks, shape.block_bytes), 0xFF).to(torch.uint8)
        kv = bits.view(self._projected[0].dtype)  # NaN
        attention, tables = make(kv, shape), StateTables(count, shape.num_blocks)
        rows = [self._row(i) for i in range(count)]
        for slot, row in enumerate(rows):
            tables.start(slot, row)
        computed, passes = [0] * count, [0] * count
        outputs: list[list[Tensor]] = [[] for _ in rows]
        while any(done < length for done, length in zip(computed, self._lengths, strict=True)):
            left = [length - done for length, done in zip(self._lengths, computed, strict=True)]
            takes = [(i, cut(left[i])) for i in range(count) if left[i]]
            takes.sort(key=lambda take: take[1] != 1)
            runs = [TokenRun(rows[i], i, n, computed[i] + n, NO_TOKENS) for i, n in takes]
            snapshots = {
                run.row.request_id: [StateSnapshot(snapshot_at, tuple(self._blocks[run.slot, 2]))]
                for run in runs
                if run.end - run.num_tokens < snapshot_at <= run.end
            }
            running = attention.begin(tables.layout(runs, snapshots))
            parts = [slice(run.end - run.num_tokens, run.end) for run in runs]
            flat = [
                torch.cat([each[run.slot][part] for run, part in zip(runs, parts, strict=True)])
                for each in (self._projected, self._gates)
            ]
            output = running.mix(LAYER, self.weights, flat[0], flat[1])
            for run, chunk in zip(runs, output.split([n for _, n in takes]), strict=True):
                outputs[run.slot].append(chunk)
                tables.advance(run.slot)
                computed[run.slot] = run.end
                passes[run.slot] += 1
        states = [self._state(kv, i, passes[i] % 2) for i in range(count)]
        copies = [
            self._state(kv, i, 2) for i in range(count) if 0 < snapshot_at <= self._lengths[i]
        ]
        is_nan = kv.view(torch.float32).isnan()
        return Outcome([torch.cat(chunks) for chunks in outputs], states, copies, is_nan)

    def prefix(self, length: int) -> RandomSequences:
        """Return the first tokens of all sequences that have so many."""
        other = object.__new__(RandomSequences)
        other.__dict__.update(self.__dict__)
        kept = [i for i, each in enumerate(self._lengths) if each >= length]
        other._lengths = [length] * len(kept)
        other._projected = [self._projected[i][:length] for i in kept]
        other._gates = [self._gates[i][:length] for i in kept]
        other._blocks = self._blocks.argsort(0)[: len(kept)] * 0 + torch.arange(
            3 * len(kept) * self.shape.num_blocks
        ).view(len(kept), 3, -1)
        return other

    def widened(self) -> RandomSequences:
        """Return the same numbers in float32."""
        other = object.__new__(RandomSequences)
        other.__dict__.update(self.__dict__)
        other.shape = replace(self.shape, dtype="float32", conv_itemsize=4)
        other._projected, other._gates = (
            [each.float() for each in parts] for parts in (self._projected, self._gates)
        )
        if isinstance(self.weights, MatrixRule) and self.weights.norm is not None:
            norm = replace(self.weights.norm, weight=self.weights.norm.weight.float())
            other.weights = replace(self.weights, norm=norm)
        count = len(self._lengths)
        ids = torch.arange(3 * count * other.shape.num_blocks)
        other._blocks = ids.view(count, 3, -1)
        return other

    def _row(self, index: int) -> PlanRow:
        sides = [tuple(map(BlockId, side)) for side in self._blocks[index, :2].tolist()]
        state = StateBlocks((sides[0], sides[1]))
        return PlanRow(RequestId(str(index)), (), 0, 0, ((),), SamplingParams(), 0, state=state)

    def _state(self, kv: Tensor, index: int, side: int) -> Tensor:
        shape = self.shape
        used = shape.rows_per_block * shape.row_bytes
        blocks = kv.view(torch.uint8)[self._blocks[index, side], :used]
        first = LAYER * shape.layer_rows
        return blocks.reshape(-1, shape.row_bytes)[first : first + shape.layer_rows]


def native(kernels: Kernels, num_threads: int = 1) -> MakeAttention:
    def make(kv: Tensor, shape: StateShape) -> LinearAttention:
        attention = NativeLinearAttention(Kernels(kernels.path, num_threads), kv, shape)
        [buffer] = attention.workspace.split(WORKSPACE_BYTES)
        ctypes.memset(buffer, 0xFF, WORKSPACE_BYTES)  # NaN, as left by earlier passes
        return attention

    return make


def whole(left: int) -> int:
    return left


def check_bits(
    make: MakeAttention,
    make_other: MakeAttention,
    sequences: RandomSequences,
    cut: Cut,
    snapshot_at: int,
) -> None:
    """Compare a pass over all tokens with passes over chunks, which take snapshots."""
    at_once = sequences.mixed(make, whole)
    chunks = sequences.mixed(make_other, cut, snapshot_at)

    assert all(map(torch.equal, at_once.outputs, chunks.outputs))
    assert all(map(torch.equal, at_once.states, chunks.states))
    if chunks.snapshots:
        expected = sequences.prefix(snapshot_at).mixed(make, whole)
        assert all(map(torch.equal, expected.states, chunks.snapshots))
        inside = sequences.mixed(make, whole, snapshot_at)
        assert all(map(torch.equal, inside.snapshots, chunks.snapshots))
        assert all(map(torch.equal, inside.states, chunks.states))


def check_accuracy(make: MakeAttention, sequences: RandomSequences, tolerance: float) -> None:
    """Compare states with the torch reference, and outputs with those in float32, rounded once."""
    found = sequences.mixed(make, whole)
    expected = sequences.mixed(TorchLinearAttention, whole)
    exact = sequences.widened().mixed(TorchLinearAttention, whole)

    num_rows = sequences.shape.matrix_rows
    for one, other in zip(found.states, expected.states, strict=True):
        matrix, wanted = (each[:num_rows].view(torch.float32) for each in (one, other))
        if num_rows:
            assert (matrix - wanted).abs().max() < tolerance * wanted.abs().max()
        assert torch.equal(one[num_rows:], other[num_rows:])  # inputs of the convolution
    for one, other in zip(found.outputs, exact.outputs, strict=True):
        rounding = torch.finfo(one.dtype).eps / 2 * other.abs()
        size = 1.0 if sequences.config.has_norm else other.abs().max()
        assert ((one.float() - other).abs() <= rounding + tolerance * size).all()
    assert torch.equal(found.is_nan, expected.is_nan)


configs = st.builds(
    lambda keys, group, key_dim, value_dim, conv, **settings: RecurrentConfig(
        keys, keys * group, key_dim, value_dim, conv, **settings
    ),
    keys=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 4]),
    key_dim=st.sampled_from([8, 12, 16, 33, 128]),
    value_dim=st.sampled_from([4, 16, 20, 32, 40, 72, 128]),
    conv=st.sampled_from([2, 4]),
    has_norm=st.booleans(),  # of Mamba2
    strength_scale=st.sampled_from([1.0, 2.0]),
)


@each_build
@each_rule
@given(
    config=configs,
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    rows_per_block=st.sampled_from([1, 5, 64]),
    most=st.sampled_from([1, 2, 20]),
    snapshot_at=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=num_examples(25))
def test_bits_depend_on_neither_chunks_nor_batch_nor_threads(
    kernels: Kernels,
    rule: Recurrence,
    config: RecurrentConfig,
    lengths: list[int],
    rows_per_block: int,
    most: int,
    snapshot_at: int,
    seed: int,
) -> None:
    config = with_rule(config, rule)
    sequences = RandomSequences(config, lengths, rows_per_block * 4 * config.value_dim + 8, seed)
    draw = random.Random(seed)

    def cut(left: int) -> int:
        return draw.randint(1, min(left, most))

    check_bits(native(kernels), native(kernels, 3), sequences, cut, snapshot_at)


@each_build
@each_rule
@given(
    config=configs,
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=num_examples(15))
def test_outputs_are_rounded_once_and_states_are_near_the_torch_reference(
    kernels: Kernels, rule: Recurrence, config: RecurrentConfig, lengths: list[int], seed: int
) -> None:
    config = with_rule(config, rule)
    sequences = RandomSequences(config, lengths, 16 * 4 * config.value_dim, seed)

    for make in (native(kernels), TorchLinearAttention):
        check_accuracy(make, sequences, tolerance=1e-4)


class TritonExample(NamedTuple):
    config: RecurrentConfig
    lengths: Sequence[int]
    snapshot_at: int


TRITON_EXAMPLES = {
    # Kept inputs that fill no row, and a tile that is not full.
    "small": TritonExample(RecurrentConfig(1, 1, 8, 5, 3), (3, 1), 2),
    "groups": TritonExample(RecurrentConfig(2, 4, 12, 20, 4), (9, 1, 4), 4),
    # Heads of several tiles, the last one not full.
    "tiles": TritonExample(RecurrentConfig(1, 3, 33, 40, 3), (7, 5), 7),
    "wide": TritonExample(
        RecurrentConfig(1, 1, 128, 128, 4, has_norm=False, strength_scale=2.0), (2, 3), 1
    ),
}


def parametrize_triton(*quick: str) -> pytest.MarkDecorator:
    """Run a test with each example and rule, by `make test` only with some of the small ones."""
    return pytest.mark.parametrize(
        ("example", "rule"),
        [
            pytest.param(
                example,
                rule,
                id=f"{name}-{rule.name.lower()}",
                marks=() if name == "small" and rule.name in quick else pytest.mark.triton,
            )
            for name, example in TRITON_EXAMPLES.items()
            for rule in (Recurrence.GATED_DELTA, Recurrence.MAMBA2)
        ],
    )


@parametrize_triton("GATED_DELTA")
def test_triton_bits_depend_on_neither_chunks_nor_batch(
    example: TritonExample, rule: Recurrence
) -> None:
    config = replace(example.config, rule=rule)
    sequences = RandomSequences(config, example.lengths, 5 * 4 * config.value_dim + 8, seed=1)
    make = triton_linear_attention

    check_bits(make, make, sequences, lambda left: min(left, 3), example.snapshot_at)


@parametrize_triton("GATED_DELTA", "MAMBA2")
def test_triton_outputs_are_rounded_once_and_states_are_near_the_torch_reference(
    example: TritonExample, rule: Recurrence
) -> None:
    config = replace(example.config, rule=rule)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        sequences = RandomSequences(
            config, example.lengths, 16 * 4 * config.value_dim, seed=2, dtype=dtype
        )
        check_accuracy(triton_linear_attention, sequences, tolerance=1e-5)


@each_build
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 16), (5, 40), (300, 96)])
@pytest.mark.parametrize("has_one_gate", [False, True])
def test_sigmoid_gates_equal_those_of_torch(
    kernels: Kernels, num_tokens: int, size: int, has_one_gate: bool
) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(num_tokens, size, generator=generator).bfloat16()
    wider = torch.randn(num_tokens, size + 3, generator=generator).bfloat16()
    gates = wider[:, :1] if has_one_gate else wider[:, 2 : size + 2]

    expected = Ops().multiply_sigmoid(numbers, gates).float()
    found = NativeOps(kernels).multiply_sigmoid(numbers.clone(), gates).float()

    # The last bit of a sigmoid can differ.
    assert ((found - expected).abs() <= 2**-7 * expected.abs()).all()
