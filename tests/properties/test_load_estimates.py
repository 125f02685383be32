"""Estimates of loads under random stores, loads and pauses: only slow copies change them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kv_transfer.external_kv import HOST
from baton.kv_transfer.tiers.tier_status import HALF_LIFE_S
from baton.kv_transfer.tiers.tiered_kv import HOST_BYTES_PER_S
from tests.support.hypothesis_profiles import num_examples
from tests.support.tier_memory import BLOCK_BYTES, name_of
from tests.support.tier_world import TierWorld, tier_world
from tests.support.virtual_time import PricedCopies, VirtualClock, VirtualPace

COPY_S = BLOCK_BYTES / HOST_BYTES_PER_S  # as the first guess
NUM_LOADED, NUM_BLOCKS = 8, 32  # the others are stored again and again
SLOW_S = 100 * COPY_S

stores = st.tuples(
    st.just("store"), st.sampled_from([0.0, 0.001, 1.0])
)  # that each copy lasts more
loads = st.tuples(st.just("load"), st.integers(1, NUM_LOADED))  # blocks
decoding = st.tuples(st.just("decode"), st.sampled_from([0, 1]))
waits = st.tuples(st.just("wait"), st.sampled_from([0.01, 10.0]))
Actions = Sequence[tuple[str, float]]


class LoadWorld:
    """Host memory with the first blocks, next to which the others are stored and dropped."""

    def __init__(self, it: TierWorld, clock: VirtualClock, copies: PricedCopies) -> None:
        self.it = it
        self._clock = clock
        self._copies = copies
        self._store_s = 0.0
        copies.before = self._take_longer
        it.store(*range(NUM_LOADED))

    def _take_longer(self, _: int) -> None:
        target, _began_s = self._copies.log[-1]
        if target == self.it.host.memory:
            self._clock.advance(self._store_s)

    def act(self, action: str, number: float) -> None:
        others = range(NUM_LOADED, NUM_BLOCKS - NUM_LOADED)
        if action == "store":
            self._store_s = number
            self.it.drop(*others)
            self.it.start_store(*others)  # goes on during the next actions
        elif action == "load":
            num_blocks = int(number)
            sources = self.it.load(range(num_blocks), into=NUM_BLOCKS - NUM_LOADED)
            assert sources == (HOST,) * num_blocks
        elif action == "decode":
            self.it.tiers.pace.set_decoding(bool(number))
        else:
            self._clock.advance(number)

    def estimate_s(self) -> float:
        return self.it.tiers.load_s([name_of(0)])


def run(actions: Actions, block_s: float = COPY_S, idle_s: float = 0.0) -> float:
    """Return the estimate after these actions, and after a pause."""
    clock = VirtualClock()
    pace, copies = VirtualPace(clock), PricedCopies(clock, block_s)
    with tier_world(
        NUM_BLOCKS, copy=copies, clock=clock, pace=pace, num_kv_blocks=NUM_BLOCKS
    ) as it:
        world = LoadWorld(it, clock, copies)
        for action in actions:
            world.act(*action)
        clock.advance(idle_s)
        return world.estimate_s()


@settings(max_examples=num_examples(60))
@given(st.lists(st.one_of(stores, loads, loads, decoding, waits), max_size=25))
def test_neither_pauses_nor_stores_change_the_estimate(actions: Actions) -> None:
    assert run(actions) == pytest.approx(COPY_S)


@settings(max_examples=num_examples(30))
@given(st.lists(st.one_of(stores, loads, decoding), max_size=25))
def test_slow_loads_raise_the_estimate_gradually_and_their_effect_decays(actions: Actions) -> None:
    num_loads = sum(action == "load" for action, _ in actions)
    estimate_s = run(actions, SLOW_S)
    assert estimate_s <= min(SLOW_S, COPY_S * 2**num_loads) * 1.01
    assert run(actions, SLOW_S, idle_s=5 * HALF_LIFE_S) < 1.5 * COPY_S
