"""Products of adapters: the implementations, and that a token's bits do not depend on others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.engine.runner.adapters.low_rank import TORCH_LOW_RANK, LowRankProducts
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.kernels.choose import native_parts
from baton.engine.runner.model.adapters import Adapter, Group, Part, Place, PlaceSize, Selection
from tests.support.triton_parts import interpreted_parts, launched_kernels

PLACE, OTHER = Place(0, "qkv"), Place(1, "qkv")
ROWS = (300, 33, 17)  # of the parts
SHAPES = [(1, 32), (9, 100), (40, 72)]  # tokens and columns


NAMES = ["torch", "native", pytest.param("triton", marks=pytest.mark.triton)]


def products_of(name: str) -> LowRankProducts:
    if name == "triton":
        return interpreted_parts().low_rank
    return TORCH_LOW_RANK if name == "torch" else native_parts().low_rank


@pytest.fixture(params=NAMES, scope="module")
def products(request: pytest.FixtureRequest) -> LowRankProducts:
    return products_of(request.param)


def an_adapter(products: LowRankProducts, rank: int, columns: int, seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    parts, first = [], 0
    for rows in ROWS:
        down, up = (
            torch.randn(rank, size, generator=generator) / size**0.5 for size in (columns, rows)
        )
        parts.append(Part(down, up, first))
        first += rows
    like = torch.empty(0, dtype=torch.bfloat16)
    return products.prepare({PLACE: parts[: 1 + seed % 3]}, like, num_layers=2)


def added(
    products: LowRankProducts, groups: Sequence[Group], inputs: Tensor, base: Tensor
) -> Tensor:
    outputs = base.clone()
    products.add(PLACE, groups, inputs, outputs)
    return outputs


def exact(groups: Sequence[Group], inputs: Tensor, base: Tensor) -> Tensor:
    outputs = base.double()
    for adapter, tokens in groups:
        for part in adapter.parts[PLACE]:
            end = part.first_row + part.up.shape[1]
            product = inputs[tokens].double() @ part.down.double().T @ part.up.double()
            outputs[tokens, part.first_row : end] += product
    return outputs


@pytest.mark.parametrize(("num_tokens", "columns"), SHAPES)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_sums_of_all_groups(
    products: LowRankProducts, num_tokens: int, columns: int, num_groups: int
) -> None:
    torch.manual_seed(num_tokens)
    inputs = torch.randn(num_tokens, columns).bfloat16()
    base = torch.randn(num_tokens, sum(ROWS)).bfloat16()
    tokens = [torch.arange(num_tokens)[first :: num_groups + 1] for first in range(num_groups)]
    groups = [
        Group(an_adapter(products, 1 + 5 * index, columns, index), chosen)
        for index, chosen in enumerate(tokens)
        if len(chosen)
    ]
    indices = np.full(num_tokens, -1)
    for index, group in enumerate(groups):
        indices[group.tokens] = index
    selection = Selection([group.adapter for group in groups], indices)

    found = added(products, products.put(selection, SHARED_INPUTS), inputs, base)

    assert torch.equal(found, added(products, groups, inputs, base))
    assert torch.allclose(found.double(), exact(groups, inputs, base), atol=3e-2, rtol=2e-2)
    others = sorted({*range(num_tokens)} - {int(each) for each in torch.cat(tokens)})
    assert torch.equal(found[others], base[others])


def test_a_place_without_parts_is_unchanged(products: LowRankProducts) -> None:
    groups = [Group(an_adapter(products, 2, 32, 0), torch.arange(3))]
    outputs = torch.ones(3, sum(ROWS)).bfloat16()
    products.add(OTHER, groups, torch.ones(3, 32).bfloat16(), outputs)

    assert bool((outputs == 1).all())


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_bits_of_a_token_do_not_depend_on_its_batch(name: str) -> None:
    products = products_of(name)
    torch.manual_seed(1)
    inputs, base = torch.randn(12, 100).bfloat16(), torch.randn(12, sum(ROWS)).bfloat16()
    adapters = [an_adapter(products, 4 + index, 100, 2 + 3 * index) for index in range(3)]
    together = [Group(each, torch.arange(index, 12, 3)) for index, each in enumerate(adapters)]
    found = added(products, together, inputs, base)

    for token in range(12):
        alone = [Group(adapters[token % 3], torch.tensor([0]))]
        row = slice(token, token + 1)
        assert torch.equal(added(products, alone, inputs[row], base[row])[0], found[token])


def an_adapter_of_heads(products: LowRankProducts, heads: Sequence[int], seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(3, 40, generator=generator) / 5
    parts = {
        Place(0, "key", head): [Part(torch.randn(3, 24, generator=generator) / 5, shared, 0)]
        for head in heads
    }
    return products.prepare(parts, torch.empty(0, dtype=torch.bfloat16), num_layers=1)


def test_heads_get_products_of_their_own(products: LowRankProducts) -> None:
    torch.manual_seed(2)
    inputs, base = torch.randn(7, 5, 24).bfloat16(), torch.randn(7, 5, 40).bfloat16()
    groups = [
        Group(an_adapter_of_heads(products, range(5), 0), torch.tensor([0, 3, 6])),
        Group(an_adapter_of_heads(products, [1], 1), torch.tensor([4])),
        Group(an_adapter(products, 2, 24, 0), torch.tensor([2])),  # of no heads
    ]

    found = products.add_to_heads(0, "key", groups, inputs, base.clone())

    wanted = base.double()
    for adapter, tokens in groups[:2]:
        for place, [part] in adapter.parts.items():
            its = inputs[tokens, place.number].double() @ part.down.double().T
            wanted[tokens, place.number] += its @ part.up.double()
    assert torch.allclose(found.double(), wanted, atol=3e-2, rtol=2e-2)
    assert torch.equal(found[[1, 2, 5]], base[[1, 2, 5]])
    assert torch.equal(found[4, [0, 2, 3, 4]], base[4, [0, 2, 3, 4]])


@pytest.mark.parametrize("name", NAMES[1:])
def test_the_bits_of_a_head_do_not_depend_on_its_batch(name: str) -> None:
    products = products_of(name)
    torch.manual_seed(3)
    inputs, base = torch.randn(9, 5, 24).bfloat16(), torch.randn(9, 5, 40).bfloat16()
    adapters = [an_adapter_of_heads(products, range(1 + seed, 5), seed) for seed in range(2)]
    together = [Group(each, torch.arange(index, 9, 2)) for index, each in enumerate(adapters)]
    found = products.add_to_heads(0, "key", together, inputs, base.clone())

    for token in (0, 3, 8):
        alone, row = [Group(adapters[token % 2], torch.tensor([0]))], slice(token, token + 1)
        own = products.add_to_heads(0, "key", alone, inputs[row], base[row].clone())
        assert torch.equal(own[0], found[token])


@pytest.mark.triton
@pytest.mark.parametrize("num_adapters", [0, 1, 3])
def test_launches_of_triton_that_a_graph_can_capture_do_not_depend_on_the_adapters(
    num_adapters: int,
) -> None:
    products, key = products_of("triton"), Place(0, "key")
    sizes = {PLACE: PlaceSize(3, 32), OTHER: PlaceSize(1, 32), key: PlaceSize(1, 32)}
    makers = [of_all_rows, of_heads, of_all_rows][:num_adapters]
    adapters = [make(products, seed) for seed, make in enumerate(makers)]
    selection = Selection(adapters, np.arange(2 * num_adapters) // 2).pad(8)
    inputs, base = torch.ones(8, 24).bfloat16(), torch.zeros(8, sum(ROWS)).bfloat16()
    heads, outputs = torch.ones(8, 5, 24).bfloat16(), torch.zeros(8, 5, 40).bfloat16()

    groups = products.put(selection, SHARED_INPUTS, sizes)
    with launched_kernels() as names:
        for place in (PLACE, OTHER):
            products.add(place, groups, inputs, base)
        outputs = products.add_to_heads(0, "key", groups, heads, outputs)

    assert names == ["project_kernel", "expand_kernel"] * 3
    changed = base.any(dim=1) | outputs.any(dim=2).any(dim=1)
    assert changed.tolist() == [True] * (2 * num_adapters) + [False] * (8 - 2 * num_adapters)


def of_all_rows(products: LowRankProducts, seed: int) -> Adapter:
    return an_adapter(products, 20, 24, seed + 2)


def of_heads(products: LowRankProducts, seed: int) -> Adapter:
    return an_adapter_of_heads(products, [1, 3], seed)


@pytest.mark.triton
def test_triton_kernels_are_compiled_when_the_first_adapter_of_a_shape_is_loaded() -> None:
    products = type(interpreted_parts().low_rank)()
    with launched_kernels() as names:
        an_adapter(products, 2, 32, 0)
        assert set(names) == {"project_kernel", "expand_kernel"}
        names.clear()
        an_adapter(products, 5, 32, 3)

    assert names == []
