"""External KV cache of the simulated engine: slow, forgetful and hostile.

It ends loads and stores in any order, writes garbage into blocks until their load has ended, fails
some, loses blocks and raises. Loads take time, and its estimates of that can be wrong. It checks
that blocks do not change while they are stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from baton.core.ids import BlockName
from baton.core.kv_hints import BlockHints
from baton.kv_transfer.external_kv import (
    NO_ORDERS,
    ExternalOrders,
    ExternalReports,
    Load,
    Loaded,
    Store,
    Use,
)
from tests.support.fake_runner import KvTensor


@dataclass(slots=True)
class _StoreInProgress:
    store: Store
    contents: list[Any]
    is_wanted: bool = True


class FakeExternal:
    """Implements KvConnector. `chance` decides what raises, ends and fails."""

    def __init__(self, kv: KvTensor, chance: random.Random, *, fails: bool = True) -> None:
        self._kv = kv
        self._chance = chance
        self._fails = fails
        self.blocks: dict[BlockName, Any] = {}
        self.loads: list[Load] = []
        self.stores: list[_StoreInProgress] = []
        self.num_loaded = 0
        self.stored_hints: dict[BlockName, BlockHints] = {}
        self.uses: list[Use] = []
        self.block_s = 0.0  # the time that a load takes for each block
        # Returns by how much the next estimate is too high.
        self.draw_error: Callable[[], float] = lambda: 1.0
        self.is_due: Callable[[Load], bool] = lambda load: True  # whether a load can end now
        self.can_end: Callable[[Store], bool] = lambda store: True
        # By `holds`. If that failed, the engine may store a block again.
        self._confirmed: set[BlockName] = set()
        self._unanswered: set[BlockName] = set()
        self._broken_rules: list[str] = []  # errors of `start` would only end its orders

    def __enter__(self) -> FakeExternal:
        return self

    def __exit__(self, *_: object) -> None: ...

    def holds(self, name: BlockName) -> bool:
        try:
            self._maybe_raise()
        except RuntimeError:
            self._unanswered.add(name)
            raise
        if name in self.blocks:
            self._confirmed.add(name)
        return name in self.blocks

    def load_s(self, names: Sequence[BlockName]) -> float:
        self._maybe_raise()
        return len(names) * self.block_s * self.draw_error()

    def start(self, orders: ExternalOrders) -> None:
        if orders != NO_ORDERS:
            self._maybe_raise()
        for store in orders.stores:
            if self.blocks.keys() & set(store.names) & self._confirmed - self._unanswered:
                self._broken_rules.append("what is stored was stored again")
            contents = [deepcopy(self._kv.blocks[each]) for each in store.block_ids]
            self.stores.append(_StoreInProgress(store, contents))
            self.stored_hints.update(zip(store.names, store.hints, strict=False))
        self.loads += orders.loads
        for use in orders.uses:
            if not use.names:
                self._broken_rules.append("a use had no block")
            self.uses.append(use)
        for name in orders.drops:
            self.blocks.pop(name, None)
            for each in self.stores:
                each.is_wanted &= name not in each.store.names

    def clear(self, tiers: Collection[str] | None = None) -> Mapping[str, int]:
        self._maybe_raise()
        if tiers is not None and "host" not in tiers:
            return {}
        num_blocks = len(self.blocks)
        self.blocks.clear()
        for each in self.stores:
            each.is_wanted = False
        return {"host": num_blocks}

    def misbehave(self) -> None:
        assert not self._broken_rules
        for load in self.loads:
            self._kv.spoil(load.block_ids)
        for each in self.stores:
            now = [self._kv.blocks[block_id] for block_id in each.store.block_ids]
            assert now == each.contents, "a block changed while it was stored"
        if self._fails and self.blocks and self._chance.random() < 0.05:
            del self.blocks[self._chance.choice(list(self.blocks))]

    def poll(self) -> ExternalReports:
        self._maybe_raise()
        loads = [each for each in self.loads if self.is_due(each) and self._chance.random() < 0.4]
        due = [each for each in self.stores if self.can_end(each.store)]
        stores = [each for each in due if self._chance.random() < 0.4]
        self.loads = [each for each in self.loads if each not in loads]
        self.stores = [each for each in self.stores if each not in stores]
        for each in stores:
            if each.is_wanted and not (self._fails and self._chance.random() < 0.1):
                self.blocks.update(zip(each.store.names, each.contents, strict=True))
        return ExternalReports(
            tuple(Loaded(load.load_id, self._load(load)) for load in loads),
            tuple(each.store.store_id for each in stores),
        )

    def _maybe_raise(self) -> None:
        if self._fails and self._chance.random() < 0.02:
            raise RuntimeError("an error of the external KV cache")

    def _load(self, load: Load) -> tuple[str | None, ...]:
        sources: list[str | None] = []
        for name, block_id in zip(load.names, load.block_ids, strict=True):
            is_there = name in self.blocks and not (self._fails and self._chance.random() < 0.1)
            if is_there:
                self._kv.blocks[block_id] = deepcopy(self.blocks[name])
                self.num_loaded += 1
            sources.append("host" if is_there else None)
        return tuple(sources)
