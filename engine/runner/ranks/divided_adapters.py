"""Adapters of a node of several processes: each has the products of its part of every layer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from baton.checkpoint.peft_folder import LowRank, PeftFolder
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.adapters.places import parts_at
from baton.engine.runner.adapters.targets import Key, find_targets
from baton.engine.runner.model.adapters import Adapter, Part, Place, Selection
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.pass_layout import Ints
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.weights.shards import narrow, own_ranges, shard_config

PlacedParts = dict[Place, list[Part]]


class AdapterShard:
    """Divides the matrices of adapters as the layers that they change."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self._shard = shard
        self._targets = find_targets(config)
        self._own = find_targets(shard_config(config, shard))

    def parts(self, matrices: Sequence[tuple[Key, LowRank]]) -> PlacedParts:
        """Return the rank's rows of `up`, and its columns of `down`, at their places."""
        placed: PlacedParts = {}
        for key, whole in matrices:
            if key in self._own:  # other experts are in other ranks
                for place, part in parts_at(self._own[key], self._cut(key, whole)):
                    placed.setdefault(place, []).append(part)
        return placed

    def _cut(self, key: Key, matrices: LowRank) -> LowRank:
        whole, own, (down, up) = self._targets[key], self._own[key], matrices
        row_parts = (each.row_parts or (each.num_rows,) for each in (own, whole))
        rows = own_ranges(self._shard, *row_parts)
        columns = own_ranges(self._shard, [own.num_columns], [whole.num_columns])
        # Copies, since pickle would write all of a file for a view of its bytes.
        return LowRank(
            narrow(down, [[range(len(down))], columns]).clone(),
            narrow(up, [rows, [range(up.shape[1])]]).clone(),
        )


@dataclass(frozen=True, slots=True)
class SentSelection:
    """`Selection` by the numbers that adapters have in all ranks."""

    numbers: Sequence[int]
    indices: Ints


class AdapterOrders(Protocol):
    """Sends adapters to the ranks that follow the first one. For any thread."""

    def load_adapter(self, number: int, parts_by_rank: Sequence[PlacedParts]) -> None:
        """Return once all have their parts. Raises ModelError and ProcessLost."""
        ...

    def drop_adapter(self, number: int) -> None: ...


class LedAdapters(AdapterTable):
    """Adapters in the first rank. The others have theirs for as long as these exist."""

    def __init__(
        self,
        active: ActiveAdapters,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *limits: int,
        shard: Shard,
        orders: AdapterOrders,
    ) -> None:
        super().__init__(active, config, dtype, device, *limits)
        self._shards = [
            AdapterShard(config, shard._replace(rank=rank)) for rank in range(shard.size)
        ]
        self._orders = orders
        self._numbers = itertools.count()
        self._number_by_adapter = weakref.WeakKeyDictionary[Adapter, int]()

    def load(self, folder: PeftFolder) -> Adapter:
        matrices = list(self.places.matrices(folder, self.max_rank))
        own, *others = (shard.parts(matrices) for shard in self._shards)
        for parts in (own, *others):
            for place, its in parts.items():
                for part in its:
                    self.check_range(folder, place, part)
        adapter, number = self.prepare(own), next(self._numbers)
        # Before they load it: some have if others cannot.
        weakref.finalize(adapter, self._orders.drop_adapter, number).atexit = False
        self._orders.load_adapter(number, others)
        self._number_by_adapter[adapter] = number
        return adapter

    def sent(self, selection: Selection | None) -> SentSelection | None:
        """Return a selection as other ranks understand it."""
        if selection is None:
            return None
        numbers = [self._number_by_adapter[adapter] for adapter in selection.adapters]
        return SentSelection(numbers, selection.indices)


@dataclass(slots=True)
class FollowedAdapters:
    """Adapters in another rank."""

    table: AdapterTable
    _by_number: dict[int, Adapter] = field(default_factory=dict)
    _sent: SentSelection | None = None
    _selection: Selection | None = None  # of it

    def load(self, number: int, parts: PlacedParts) -> None:
        """One thread at a time, any, as is `drop`."""
        self._by_number[number] = self.table.prepare(parts)

    def drop(self, number: int) -> None:
        self._by_number.pop(number, None)

    def select(self, sent: SentSelection | None) -> Selection | None:
        """Return the adapters of a pass. For the thread that computes it."""
        if not _are_same(sent, self._sent):
            self.table.forget_selection()
            self._selection = None
            if sent is not None:
                adapters = [self._by_number[number] for number in sent.numbers]
                self._selection = Selection(adapters, sent.indices)
            self._sent = sent
        return self._selection


def _are_same(first: SentSelection | None, second: SentSelection | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.numbers == second.numbers and np.array_equal(first.indices, second.indices)
