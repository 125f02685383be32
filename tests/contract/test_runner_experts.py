"""Mixture of experts on each implementation: against torch, and the same bits in any batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.checkpoint.quantized import MXFP4_GROUP, Quantized
from baton.engine.runner.adapters.adapted_experts import AdaptedExperts, merge_router
from baton.engine.runner.adapters.low_rank import ActiveAdapters, ExpertPass, LowRankProducts
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import TORCH, merges_routers
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_linear import native_experts
from baton.engine.runner.kernels.native_low_rank import NativeLowRankProducts
from baton.engine.runner.model.adapters import ROUTER, Adapter, Group, Part, Place
from baton.engine.runner.model.config import Activation, MoeConfig, Scoring
from baton.engine.runner.model.linear import ExpertChoice, Mlp, Moe, Router
from baton.engine.runner.model.ops import MlpGate, Ops
from baton.engine.runner.weights.quantize import Quantize, to_int4, to_int8
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant
from tests.support.random_quantized import to_int4_zeros
from tests.support.triton_parts import (
    batch_invariant_ops,
    interpreted_parts,
    launched_kernels,
    triton_ops,
)

REFERENCE = Ops()
HIDDEN_SIZE, EXPERT_SIZE = 70, 50
GATES = (
    MlpGate(),
    MlpGate(Activation.GELU_TANH),
    MlpGate(Activation.CLAMPED_SWIGLU, alpha=1.702, limit=2.0),
    MlpGate(Activation.SQUARED_RELU),
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def to_mxfp4(weight: Tensor) -> Quantized:
    """Return random codes, drawn by the sum of the weights, with scales of 1/16 and 1/8."""
    rows, columns = weight.shape
    drawn = generator(int(weight.double().abs().sum() * 2**16))
    codes = torch.randint(0, 16, (rows, columns), generator=drawn).to(torch.uint8)
    scales = 2.0 ** -torch.randint(3, 5, (rows, -(-columns // MXFP4_GROUP)), generator=drawn)
    no_zeros = torch.empty(rows, 0, dtype=torch.uint8)
    return Quantized(codes, scales, no_zeros, 4, MXFP4_GROUP, torch.bfloat16, is_mxfp4=True)


QUANTIZERS: Mapping[str, Quantize] = {
    "int8": to_int8,
    "int4": to_int4,
    "int4 with zero points": to_int4_zeros,
    "mxfp4": to_mxfp4,
}
FORMATS = ("none", *QUANTIZERS)

VARIANTS = kernels_by_variant()
each_variant = pytest.mark.parametrize("kernels", VARIANTS.values(), ids=VARIANTS.keys())


def parametrize_ops() -> pytest.MarkDecorator:
    """Run a test with each implementation. The interpreter of Triton takes long."""
    native = [
        pytest.param(partial(NativeOps, kernels), id=name)
        for name, kernels in kernels_by_variant().items()
    ]
    triton = pytest.param(triton_ops, id="triton", marks=pytest.mark.triton)
    return pytest.mark.parametrize("make_ops", [*native, triton])


each_ops = parametrize_ops()
each_format = pytest.mark.parametrize("quantize", FORMATS)
SEEDS = st.integers(0, 2**32)


@st.composite
def moe_configs(draw: st.DrawFn) -> MoeConfig:
    num_groups = draw(st.sampled_from([1, 1, 2, 4]))
    group_size = draw(st.integers(1, 40))
    top_groups = draw(st.integers(1, num_groups))
    return MoeConfig(
        num_experts=num_groups * group_size,
        top_k=draw(st.integers(1, min(top_groups * group_size, 20))),
        expert_size=EXPERT_SIZE,
        scoring=draw(st.sampled_from(Scoring)),
        normalizes=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=num_groups,
        top_groups=top_groups,
        has_correction_bias=draw(st.booleans()),
        has_bias=draw(st.booleans()),
    )


def router_of(config: MoeConfig, hidden_size: int, seed: int) -> Router:
    drawn = generator(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=drawn)

    return Router(
        config,
        0.3 * random(config.num_experts, hidden_size),
        random(config.num_experts) if config.has_bias else None,
        0.1 * random(config.num_experts) if config.has_correction_bias else None,
    )


def moe_of(
    config: MoeConfig, ops: Ops, quantize: str, seed: int = 0, *, is_gated: bool = True
) -> Moe:
    """Return the same experts for any `ops`."""
    drawn = generator(seed)

    def matrix(rows: int, columns: int) -> Tensor | Quantized:
        weight = (0.2 * torch.randn(rows, columns, generator=drawn)).bfloat16()
        return weight if quantize == "none" else QUANTIZERS[quantize](weight)

    def bias(rows: int) -> Tensor | None:
        return torch.randn(rows, generator=drawn).bfloat16() if config.has_bias else None

    size = config.expert_size
    rows = 2 * size if is_gated else size
    experts = [
        Mlp(
            ops.linear(matrix(rows, HIDDEN_SIZE), bias(rows)),
            ops.linear(matrix(HIDDEN_SIZE, size), bias(HIDDEN_SIZE)),
        )
        for _ in range(config.num_experts)
    ]
    return Moe(config, router_of(config, HIDDEN_SIZE, seed), experts, None, None)


def states(num_tokens: int, seed: int, size: int = HIDDEN_SIZE) -> Tensor:
    return torch.randn(num_tokens, size, generator=generator(seed)).bfloat16()


def compute(ops: Ops, moe: Moe, hidden_states: Tensor, gate: MlpGate = GATES[0]) -> Tensor:
    return ops.mix_experts(moe, gate, hidden_states, ops.route(hidden_states, moe.router))


def are_near(found: Tensor, wanted: Tensor) -> bool:
    """Return whether values differ by a few roundings of the largest one."""
    largest = wanted.float().abs().max().item()
    return torch.allclose(found.float(), wanted.float(), rtol=0, atol=0.02 * largest)


@each_variant
@given(
    config=moe_configs(), num_tokens=st.integers(1, 70), hidden_size=st.integers(1, 90), seed=SEEDS
)
@settings(max_examples=num_examples(60))
def test_experts_are_chosen_as_in_torch(
    kernels: Kernels, config: MoeConfig, num_tokens: int, hidden_size: int, seed: int
) -> None:
    router, hidden_states = router_of(config, hidden_size, seed), states(num_tokens, 1, hidden_size)

    found = NativeOps(kernels).route(hidden_states, router)

    wanted = REFERENCE.route(hidden_states, router)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-4, atol=1e-6)
    # Of two experts whose scores are equal up to a rounding, either can come first.
    assert (found.expert_ids != wanted.expert_ids).float().mean() < 0.02
    ids = found.expert_ids.sort(dim=1).values
    assert (ids.diff(dim=1) > 0).all()


ROUTINGS = {
    "softmax": MoeConfig(21, 4, EXPERT_SIZE, has_bias=True),
    "normalized": MoeConfig(8, 8, EXPERT_SIZE, Scoring.SOFTMAX, normalizes=True, scale=2.5),
    "softmax of top": MoeConfig(33, 5, EXPERT_SIZE, Scoring.SOFTMAX_OF_TOP, has_bias=True),
    "one": MoeConfig(1, 1, EXPERT_SIZE, Scoring.SIGMOID),
    "groups": MoeConfig(
        24,
        5,
        EXPERT_SIZE,
        Scoring.SIGMOID,
        normalizes=True,
        num_groups=3,
        top_groups=2,
        has_correction_bias=True,
    ),
    "small groups": MoeConfig(7, 2, EXPERT_SIZE, num_groups=7, top_groups=3),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name == "groups" else pytest.param(name, marks=pytest.mark.triton)
        for name in ROUTINGS
    ],
)
def test_experts_are_chosen_by_triton_as_in_torch(name: str) -> None:
    config, hidden_states = ROUTINGS[name], states(9, 1)
    router = router_of(config, HIDDEN_SIZE, 2)

    found, wanted = (
        triton_ops().route(hidden_states, router),
        REFERENCE.route(hidden_states, router),
    )

    assert found.expert_ids.tolist() == wanted.expert_ids.tolist()
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("scoring", Scoring)
def test_of_equal_scores_triton_chooses_the_lower_expert_id_first(scoring: Scoring) -> None:
    check_ties(triton_ops(), scoring)


@each_variant
@pytest.mark.parametrize("scoring", Scoring)
def test_of_equal_scores_the_lower_expert_id_comes_first(
    kernels: Kernels, scoring: Scoring
) -> None:
    check_ties(NativeOps(kernels), scoring)


def check_ties(ops: Ops, scoring: Scoring) -> None:
    config = MoeConfig(24, 5, EXPERT_SIZE, scoring)
    weight = torch.zeros(24, HIDDEN_SIZE)
    weight[[7, 20]] = 1.0

    found = ops.route(torch.ones(2, HIDDEN_SIZE).bfloat16(), Router(config, weight, None, None))

    assert found.expert_ids.tolist() == [[7, 20, 0, 1, 2]] * 2


@each_variant
@given(
    config=moe_configs().filter(lambda config: config.num_experts <= 40),
    num_tokens=st.integers(1, 30),
    quantize=st.sampled_from(FORMATS),
    gate=st.sampled_from(GATES),
    scales_input=st.booleans(),
    seed=SEEDS,
)
@settings(max_examples=num_examples(25))
def test_experts_are_mixed_as_in_torch(
    kernels: Kernels,
    config: MoeConfig,
    num_tokens: int,
    quantize: str,
    gate: MlpGate,
    scales_input: bool,
    seed: int,
) -> None:
    config = replace(config, scales_input=scales_input)
    check_mixing(NativeOps(kernels), config, states(num_tokens, seed + 1), quantize, gate, seed)


@pytest.mark.triton
@each_format
@pytest.mark.parametrize("num_tokens", [1, 29])
@pytest.mark.parametrize(
    ("config", "gate"),
    [
        (MoeConfig(7, 2, EXPERT_SIZE, has_bias=True), GATES[2]),
        (MoeConfig(40, 3, EXPERT_SIZE), GATES[1]),
        (MoeConfig(3, 1, EXPERT_SIZE, scales_input=True), GATES[0]),
    ],
    ids=["biases", "many", "scaled inputs"],
)
def test_experts_are_mixed_by_triton_as_in_torch(
    config: MoeConfig, gate: MlpGate, num_tokens: int, quantize: str
) -> None:
    check_mixing(triton_ops(), config, states(num_tokens, 3), quantize, gate)


def check_mixing(
    ops: Ops,
    config: MoeConfig,
    hidden_states: Tensor,
    quantize: str,
    gate: MlpGate,
    seed: int = 0,
) -> None:
    """Compare a mixture of experts with that of torch."""
    is_gated = gate.activation.is_gated
    moe = moe_of(config, ops, quantize, seed, is_gated=is_gated)
    routing = ops.route(hidden_states, moe.router)

    found = ops.mix_experts(moe, gate, hidden_states, routing)

    same_experts = moe_of(config, REFERENCE, quantize, seed, is_gated=is_gated)
    assert are_near(found, REFERENCE.mix_experts(same_experts, gate, hidden_states, routing))


@each_variant
@each_format
@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID])
def test_a_token_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    kernels: Kernels, quantize: str, scoring: Scoring
) -> None:
    config = MoeConfig(12, 3, EXPERT_SIZE, scoring, normalizes=True, has_bias=True)
    ops, hidden_states = NativeOps(kernels), states(41, 5)
    moe = moe_of(config, ops, quantize)

    together = compute(ops, moe, hidden_states)

    assert native_experts(moe.experts) is not None
    for num_threads, size in ((1, 1), (1, 41), (2, 2), (3, 7), (3, 41)):
        other = NativeOps(Kernels(kernels.path, num_threads))
        parts = [compute(other, moe, part) for part in hidden_states.split(size)]
        assert torch.equal(torch.cat(parts), together)


@each_variant
def test_weights_and_choices_have_the_same_bits_in_any_batch(kernels: Kernels) -> None:
    config = MoeConfig(130, 6, EXPERT_SIZE, normalizes=True, has_bias=True)
    router, hidden_states = router_of(config, 600, 3), states(75, 4, 600)

    together = NativeOps(kernels).route(hidden_states, router)

    for num_threads, size in ((1, 1), (1, 75), (2, 2), (3, 3), (3, 66)):
        other = NativeOps(Kernels(kernels.path, num_threads))
        parts = [other.route(part, router) for part in hidden_states.split(size)]
        for found, wanted in zip(zip(*parts, strict=True), together, strict=True):
            assert torch.equal(torch.cat(found), wanted)


@each_ops
@each_format
def test_many_tokens_of_one_expert_are_all_computed(
    make_ops: Callable[[], Ops], quantize: str
) -> None:
    """One expert gets more tokens than fit into a cache, another gets none."""
    config = MoeConfig(3, 1, EXPERT_SIZE)
    ops, hidden_states = make_ops(), states(450, 6)
    moe = moe_of(config, ops, quantize)
    expert_ids = torch.tensor([2] * 430 + [0] * 20)[:, None]
    weights = torch.ones(450, 1)

    together = ops.mix_experts(moe, GATES[0], hidden_states, ExpertChoice(expert_ids, weights))

    parts = [
        ops.mix_experts(moe, GATES[0], *taken(hidden_states, expert_ids, weights, first))
        for first in range(0, 450, 50)
    ]
    assert torch.equal(together, torch.cat(parts))


def taken(
    hidden_states: Tensor, expert_ids: Tensor, weights: Tensor, first: int
) -> tuple[Tensor, ExpertChoice]:
    rows = slice(first, first + 50)
    return hidden_states[rows], ExpertChoice(expert_ids[rows], weights[rows])


@each_ops
@each_format
@pytest.mark.parametrize("scoring", Scoring)
def test_nan_stays_in_its_own_row(
    make_ops: Callable[[], Ops], quantize: str, scoring: Scoring
) -> None:
    config = MoeConfig(8, 3, EXPERT_SIZE, scoring, num_groups=2, top_groups=1)
    ops, hidden_states = make_ops(), states(4, 8)
    hidden_states[1, 5] = float("nan")
    hidden_states[2, 6] = float("inf")
    moe = moe_of(config, ops, quantize)

    routing, rows = ops.route(hidden_states, moe.router), torch.tensor([0, 3])
    found = ops.mix_experts(moe, GATES[0], hidden_states, routing)

    assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]
    others = ExpertChoice(*(each[rows] for each in routing))
    assert torch.equal(found[rows], ops.mix_experts(moe, GATES[0], hidden_states[rows], others))


@each_ops
def test_experts_with_reordered_columns_are_computed(make_ops: Callable[[], Ops]) -> None:
    config, ops = MoeConfig(4, 2, EXPERT_SIZE), make_ops()
    hidden_states = states(9, 10)

    def moe_with(ops: Ops) -> Moe:
        moe, drawn = moe_of(config, ops, "int4"), generator(11)
        order = torch.randperm(HIDDEN_SIZE, generator=drawn)
        weight = to_int4(torch.randn(2 * EXPERT_SIZE, HIDDEN_SIZE, generator=drawn).bfloat16())
        reordered = ops.linear(replace(weight, order=order), None)
        return replace(moe, experts=[Mlp(reordered, mlp.down) for mlp in moe.experts])

    moe = moe_with(ops)
    found = compute(ops, moe, hidden_states)

    assert are_near(found, compute(REFERENCE, moe_with(REFERENCE), hidden_states))


# --- adapters -------------------------------------------------------------------------------------


def adapted_experts(ops: Ops, moe: Moe, products: LowRankProducts) -> AdaptedExperts:
    return AdaptedExperts(moe, 0, ops, GATES[0], ActiveAdapters(products))


def an_adapter(products: LowRankProducts, moe: Moe, experts: Sequence[int], seed: int) -> Adapter:
    """Return an adapter of these experts, and, if the seed is odd, of the router."""
    drawn = generator(seed)

    def part(rows: int, columns: int, first_row: int = 0) -> Part:
        down, up = (torch.randn(3, size, generator=drawn) / 9 for size in (columns, rows))
        return Part(down, up, first_row)

    parts: dict[Place, Sequence[Part]] = {}
    for expert in experts:
        both = part(EXPERT_SIZE, HIDDEN_SIZE), part(EXPERT_SIZE, HIDDEN_SIZE, EXPERT_SIZE)
        parts[Place(0, "gate_up", expert)] = both
        if expert % 3:
            parts[Place(0, "down", expert)] = [part(HIDDEN_SIZE, EXPERT_SIZE)]
    routers = {}
    if seed % 2:
        of_router = [part(moe.config.num_experts, HIDDEN_SIZE)]
        if products.merges_routers:
            routers[0] = merge_router(moe.router, of_router)
        else:
            parts[Place(0, ROUTER)] = of_router
    adapter = products.prepare(parts, torch.empty(0, dtype=torch.bfloat16), num_layers=1)
    return replace(adapter, routers=routers)


def native(kernels: Kernels) -> tuple[Ops, LowRankProducts]:
    return NativeOps(kernels), NativeLowRankProducts(kernels)


def test_kernels_merge_routers_of_adapters_as_their_name_says() -> None:
    assert TORCH.low_rank.merges_routers is merges_routers("torch")
    assert NativeLowRankProducts.merges_routers is merges_routers("native")


@pytest.mark.triton
def test_triton_kernels_merge_no_routers_as_their_name_says() -> None:
    assert interpreted_parts().low_rank.merges_routers is merges_routers("triton")


def triton() -> tuple[Ops, LowRankProducts]:
    return batch_invariant_ops(), interpreted_parts().low_rank


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(partial(native, each), id=name) for name, each in VARIANTS.items()),
        pytest.param(triton, id="triton", marks=pytest.mark.triton),
    ],
)
def test_experts_with_adapters_equal_those_computed_one_by_one_and_have_the_same_bits_in_any_batch(
    make: Callable[[], tuple[Ops, LowRankProducts]], *, scales_input: bool
) -> None:
    config = MoeConfig(9, 3, EXPERT_SIZE, normalizes=True, scales_input=scales_input)
    ops, products = make()
    moe, hidden_states = moe_of(config, ops, "none"), states(11, 4)
    adapters = [
        an_adapter(products, moe, experts, seed)
        for seed, experts in enumerate(([*range(9)], [1, 2, 5], []))
    ]
    groups = [Group(each, torch.arange(index, 11, 4)) for index, each in enumerate(adapters)]

    def mixed(groups: Sequence[Group], inputs: Tensor) -> Tensor:
        experts = adapted_experts(ops, moe, products)
        experts.active.groups = groups
        return experts.mix(inputs)

    found = mixed(groups, hidden_states)

    one_by_one = adapted_experts(ops, moe, cast("LowRankProducts", OneByOne(products)))
    one_by_one.active.groups = groups
    wanted = one_by_one.mix(hidden_states)
    assert are_near(found, wanted)
    plain = compute(ops, moe, hidden_states)
    assert torch.equal(found[3::4], plain[3::4])
    assert not are_near(found[::4], plain[::4])
    for token in range(11):
        own = [Group(each, torch.tensor([0])) for each in adapters[token % 4 : token % 4 + 1]]
        assert torch.equal(mixed(own, hidden_states[token : token + 1])[0], found[token])


class OneByOne:
    """The reference: experts are linear layers with adapters, one after the other."""

    def __init__(self, products: LowRankProducts) -> None:
        self._products = products

    def __getattr__(self, name: str) -> Any:
        return getattr(self._products, name)

    def mix_experts(self, pass_: ExpertPass, groups: Sequence[Group]) -> Tensor | None:
        return None


@pytest.mark.triton
def test_launches_of_triton_do_not_depend_on_the_number_of_experts_and_adapters() -> None:
    found = []
    for num_experts, num_adapters in ((2, 1), (9, 1), (9, 3)):
        ops, products = triton()
        moe = moe_of(MoeConfig(num_experts, 2, EXPERT_SIZE), ops, "none")
        adapters = [
            an_adapter(products, moe, [*range(num_experts)], seed) for seed in range(num_adapters)
        ]
        experts = adapted_experts(ops, moe, products)
        experts.active.groups = [
            Group(each, torch.tensor([index])) for index, each in enumerate(adapters)
        ]
        with launched_kernels() as names:
            experts.mix(states(4, 4))
        found.append([name for name in names if name != "linear_kernel"])

    assert found[0] == found[1]
    router = ["project_kernel", "expand_kernel"]
    assert found[2] == [*router, *found[1]]
