from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.kv_transfer.tiers.eviction import DEFAULT_PRIORITY
from baton.kv_transfer.tiers.stores.block_file import BlockTime

TIMES_S = st.floats(1.0, 4e9)
PRIORITIES = st.integers(0, 100)


@given(TIMES_S, PRIORITIES)
def test_a_file_time_encodes_the_priority_and_the_second(used_s: float, priority: int) -> None:
    kept = BlockTime.from_ns(BlockTime(used_s, priority).to_ns())

    assert kept.priority == priority
    assert abs(kept.used_s - used_s) <= 1.0


@given(TIMES_S, PRIORITIES)
def test_file_systems_that_keep_microseconds_keep_priorities(used_s: float, priority: int) -> None:
    time_ns = BlockTime(used_s, priority).to_ns()

    assert BlockTime.from_ns(time_ns // 1000 * 1000).priority == priority


def test_file_times_of_older_versions_have_the_default_priority() -> None:
    for time_ns in (
        0,
        1_700_000_000_000_000_000,
        1_700_000_000_735_080_001,
        1_700_000_000_735_999_000,
    ):
        assert BlockTime.from_ns(time_ns).priority == DEFAULT_PRIORITY


def test_a_released_block_has_no_priority() -> None:
    assert BlockTime.from_ns(BlockTime(0.0, 80).to_ns()) == BlockTime(0.0)
