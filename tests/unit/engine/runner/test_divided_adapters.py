"""Adapters of nodes of several processes: how their matrices are divided, and for how long."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.checkpoint.peft_folder import PeftFolder
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.core.errors import ModelError
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import TORCH_LOW_RANK, ActiveAdapters
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.adapters import Adapter, Part, Place, Selection
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.ranks.divided_adapters import (
    FollowedAdapters,
    LedAdapters,
    PlacedParts,
    SentSelection,
)
from benchmarks.engine.adapters import write_random_adapter
from tests.support.random_folders import small_config

CPU, LIMITS = torch.device("cpu"), (16, 8, 8)


class Orders:
    """Implements `AdapterOrders` by another rank in this process."""

    def __init__(self, followed: FollowedAdapters) -> None:
        self._followed = followed
        self.fault: Exception | None = None
        self.dropped: list[int] = []

    def load_adapter(self, number: int, parts_by_rank: Sequence[PlacedParts]) -> None:
        [parts] = parts_by_rank
        self._followed.load(number, parts)
        if self.fault is not None:
            raise self.fault

    def drop_adapter(self, number: int) -> None:
        self.dropped.append(number)
        self._followed.drop(number)


class Node:
    """Tables of two ranks."""

    def __init__(self, config: ModelConfig) -> None:
        active = ActiveAdapters(TORCH_LOW_RANK)
        table = AdapterTable(active, config, torch.float32, CPU, *LIMITS)
        self.followed = FollowedAdapters(table)
        self.orders = Orders(self.followed)
        self.led = LedAdapters(
            ActiveAdapters(TORCH_LOW_RANK),
            config,
            torch.float32,
            CPU,
            *LIMITS,
            shard=Shard(0, 2),
            orders=self.orders,
        )


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(small_config("qwen3-0.6b")))
    return read_model_config(SafetensorsFolder(tmp_path))


@pytest.fixture
def folder(tmp_path: Path, config: ModelConfig) -> PeftFolder:
    write_random_adapter(str(tmp_path), tmp_path / "adapter", rank=4, seed=0)
    return PeftFolder(tmp_path / "adapter")


def select(adapter: Adapter, count: int) -> Selection:
    return Selection([adapter], np.zeros(count, dtype=np.int64))


def parts_of(adapter: Adapter, place: Place) -> list[Part]:
    return sorted(adapter.parts[place], key=lambda part: part.first_row)


def test_ranks_have_a_half_of_each_matrix(config: ModelConfig, folder: PeftFolder) -> None:
    node = Node(config)
    whole = AdapterTable(ActiveAdapters(TORCH_LOW_RANK), config, torch.float32, CPU, *LIMITS).load(
        folder
    )

    first = node.led.load(folder)
    sent = node.led.sent(select(first, 1))
    second = node.followed.select(sent)
    assert second is not None

    [other] = second.adapters
    for place, axis in ((Place(0, "down"), 1), (Place(1, "output"), 1)):
        [own], [others], [both] = (each.parts[place] for each in (first, other, whole))
        assert torch.equal(torch.cat((own.down, others.down), dim=axis), both.down)
        assert torch.equal(own.up, both.up)
        assert torch.equal(others.up, both.up)
    adapters = first, other, whole
    gates_and_ups = zip(*(parts_of(each, Place(0, "gate_up")) for each in adapters), strict=True)
    for own, others, both in gates_and_ups:
        assert torch.equal(torch.cat((own.up, others.up), dim=1), both.up)
        assert own.first_row == others.first_row == both.first_row // 2
    assert first.num_bytes + other.num_bytes < 1.5 * whole.num_bytes


def test_other_ranks_have_an_adapter_for_as_long_as_the_first_one(
    config: ModelConfig, folder: PeftFolder
) -> None:
    node = Node(config)
    adapter = node.led.load(folder)
    node.led.add("a", adapter)
    sent = node.led.sent(select(adapter, 3))
    first = node.followed.select(sent)
    assert first is not None
    groups = node.followed.table.put(first, SHARED_INPUTS)

    again = node.followed.select(SentSelection([0], np.zeros(3, dtype=np.int64)))
    assert again is first  # as in the steps of the same decodes
    assert node.followed.table.put(again, SHARED_INPUTS) is groups
    longer = node.followed.select(SentSelection([0], np.zeros(4, dtype=np.int64)))
    assert longer is not None
    assert len(node.followed.table.put(longer, SHARED_INPUTS)[0].tokens) == 4

    node.led.remove("a")
    assert node.orders.dropped == []
    del adapter
    gc.collect()
    assert node.orders.dropped == [0]
    assert node.followed.select(None) is None
    with pytest.raises(KeyError):
        node.followed.select(sent)


def test_an_adapter_that_a_rank_cannot_load_is_dropped_by_all(
    config: ModelConfig, folder: PeftFolder
) -> None:
    node = Node(config)
    node.orders.fault = ModelError("no memory")

    with pytest.raises(ModelError, match="no memory"):
        node.led.load(folder)

    node.orders.fault = None  # whose traceback has the adapter
    gc.collect()
    assert node.orders.dropped == [0]
