"""Adapters of a pass: the tokens of each, and results that are reused for the same decodes."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import TORCH_LOW_RANK, ActiveAdapters, LowRankProducts
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.adapters import ROUTER, Adapter, Group, Place
from baton.engine.runner.model.linear import Router
from baton.engine.runner.model.pass_layout import TokenRun
from benchmarks.engine.adapters import write_random_adapter
from tests.support.hub_configs import HUB_CONFIGS
from tests.support.random_folders import small_config
from tests.support.triton_parts import interpreted_parts

# Dense; experts with a router; latent attention, where heads share matrices; gated delta rule.
SHAPES = ("qwen3-0.6b", "qwen3-30b-a3b", "deepseek-v2-lite", "qwen3-next-80b-a3b")
NAMES = ("first", "second", "unused")
NO_TOKENS = np.zeros(0, dtype=np.int64)


@pytest.fixture
def adapters() -> dict[str, Adapter]:
    return {name: Adapter({}) for name in NAMES}


@pytest.fixture
def table(tmp_path: Path, adapters: dict[str, Adapter]) -> AdapterTable:
    (tmp_path / "config.json").write_text(json.dumps(HUB_CONFIGS["Llama-3.2-1B"]))
    config = read_model_config(SafetensorsFolder(tmp_path))
    place = torch.device("cpu")
    table = AdapterTable(ActiveAdapters(TORCH_LOW_RANK), config, torch.bfloat16, place, 16, 8, 8)
    for name, adapter in adapters.items():
        table.add(name, adapter)
    return table


def runs_of(*runs: tuple[str, int]) -> list[TokenRun]:
    """Return runs with these adapters and numbers of tokens."""
    sampling = SamplingParams()
    return [
        TokenRun(
            PlanRow(RequestId("r"), (), 0, 0, ((),), sampling, 0, adapter=adapter),
            slot,
            num_tokens,
            num_tokens,
            NO_TOKENS,
        )
        for slot, (adapter, num_tokens) in enumerate(runs)
    ]


def groups_of(table: AdapterTable, *runs: tuple[str, int]) -> Sequence[Group]:
    """Return the groups of a pass that has some."""
    selection = table.select(runs_of(*runs))
    assert selection is not None
    return table.put(selection, SHARED_INPUTS)


def tokens_of(groups: Sequence[Group], adapter: Adapter) -> list[int]:
    """Return the tokens of the one group with this adapter."""
    [group] = [each for each in groups if each.adapter is adapter]
    assert group.tokens.dtype is torch.int64
    return list(map(int, group.tokens))


def expected(runs: Sequence[tuple[str, int]], name: str) -> list[int]:
    ends = accumulate(count for _, count in runs)
    return [
        token
        for (adapter, count), end in zip(runs, ends, strict=True)
        if adapter == name
        for token in range(end - count, end)
    ]


@pytest.mark.parametrize(
    "runs",
    [
        [("first", 1)],
        [("", 3), ("second", 2)],
        [("second", 1), ("", 1), ("first", 1), ("second", 1), ("first", 700), ("", 5)],
    ],
)
def test_each_adapter_gets_its_tokens(
    table: AdapterTable, adapters: dict[str, Adapter], runs: list[tuple[str, int]]
) -> None:
    groups = groups_of(table, *runs)

    used = list(dict.fromkeys(name for name, _ in runs if name))
    assert [group.adapter for group in groups] == [adapters[name] for name in used]
    for name in used:
        assert tokens_of(groups, adapters[name]) == expected(runs, name)


@pytest.mark.parametrize("runs", [[], [("", 1), ("", 40)]])
def test_a_pass_without_adapters(table: AdapterTable, runs: list[tuple[str, int]]) -> None:
    table.select(runs_of(("first", 1)))

    assert table.select(runs_of(*runs)) is None


def test_the_next_step_of_the_same_decodes_reuses_its_groups(table: AdapterTable) -> None:
    decodes = [("first", 1), ("", 1), ("second", 1)]
    groups = groups_of(table, *decodes)

    assert groups
    assert groups_of(table, *decodes) is groups


@pytest.mark.parametrize("others", [[("first", 2), ("second", 1)], [("second", 1), ("first", 1)]])
def test_other_runs_get_groups_of_their_own(
    table: AdapterTable, adapters: dict[str, Adapter], others: list[tuple[str, int]]
) -> None:
    table.select(runs_of(("first", 1), ("second", 1)))

    groups = groups_of(table, *others)

    for name in ("first", "second"):
        assert tokens_of(groups, adapters[name]) == expected(others, name)


def test_an_adapter_that_replaces_another_is_used(
    table: AdapterTable, adapters: dict[str, Adapter]
) -> None:
    runs = [("first", 1), ("first", 3)]
    table.select(runs_of(*runs))
    table.remove("first")
    adapters["first"] = Adapter({})
    table.add("first", adapters["first"])

    groups = groups_of(table, *runs)

    assert tokens_of(groups, adapters["first"]) == [0, 1, 2, 3]


def test_an_adapter_that_is_removed_is_not_kept(table: AdapterTable) -> None:
    kept = Adapter({})
    table.add("other", kept)
    groups_of(table, ("other", 1))
    alive = weakref.ref(kept)
    del kept

    table.remove("other")

    assert alive() is None


def test_an_adapter_that_is_not_in_memory_is_an_error(table: AdapterTable) -> None:
    runs = runs_of(("first", 1))
    table.select(runs)
    table.remove("first")

    with pytest.raises(KeyError):
        table.select(runs)


def triton_products() -> LowRankProducts:
    return interpreted_parts().low_rank


@pytest.mark.parametrize(
    "make_products",
    [lambda: TORCH_LOW_RANK, pytest.param(triton_products, marks=pytest.mark.triton)],
    ids=["torch", "triton"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_adapters_that_change_all_matrices_take_the_memory_that_is_left_free(
    shape: str, dtype: torch.dtype, make_products: Callable[[], LowRankProducts], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_config(shape)))
    config = read_model_config(SafetensorsFolder(tmp_path))
    active = ActiveAdapters(make_products())
    if config.moe is not None:
        weight = torch.zeros(config.moe.num_experts, config.hidden_size)
        router = Router(config.moe, weight, bias=None, correction_bias=None)
        active.routers |= dict.fromkeys(range(config.num_layers), router)
    table = AdapterTable(active, config, dtype, torch.device("cpu"), 3, 1, num_places=2)
    loaded = []
    for seed in range(2):
        write_random_adapter(str(tmp_path), tmp_path / str(seed), rank=3, seed=seed)
        loaded.append(table.load(PeftFolder(tmp_path / str(seed))))

    assert sum(adapter.num_bytes for adapter in loaded) == table.max_bytes
    most: dict[Place, int] = {}  # parts, which graphs have launches for
    for place, parts in loaded[0].parts.items():
        own = place._replace(number=None)
        most[own] = max(most.get(own, 0), len(parts))
        assert {len(part.down) for part in parts} == {3}
    sizes = AdapterPlaces(config).sizes(3)
    assert {size.rank for size in sizes.values()} == {3}
    assert most == {place: sizes[place].num_parts for place in most}
    assert {place.name for place in set(sizes) - set(most)} <= {ROUTER}
