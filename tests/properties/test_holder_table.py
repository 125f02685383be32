"""Holder table of a router under random events: it equals a dictionary of sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.routing.holder_table import HolderTable
from baton.router.routing.key_table import Keys, as_keys

NUM_KEYS = 6000  # more than a table has slots at first, so that it grows
KEYS = as_keys(np.random.default_rng(7).integers(1, 1 << 63, NUM_KEYS, np.uint64) << np.uint64(1))

parts = st.tuples(st.integers(0, NUM_KEYS - 1), st.integers(0, 2500))
holders = st.sampled_from([f"n{number}" for number in range(70)])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), holders, parts),
        st.tuples(st.just("remove"), holders, parts),
        st.tuples(st.just("drop"), holders, st.just((0, 0))),
    ),
    max_size=60,
)


@given(steps, st.lists(parts, min_size=1, max_size=4))
def test_a_table_holds_what_was_added_and_not_removed(
    history: list[tuple[str, str, tuple[int, int]]], requests: list[tuple[int, int]]
) -> None:
    table, expected = HolderTable(), dict[str, set[int]]()

    for change, holder, part in history:
        keys = _keys(part)
        held = expected.setdefault(holder, set())
        match change:
            case "add":
                table.add(holder, keys)
                held.update(keys.tolist())
            case "remove":
                table.remove(holder, keys)
                held.difference_update(keys.tolist())
            case _:
                table.drop(holder)
                held.clear()

    assert {holder: table.num_names(holder) for holder in expected} == {
        holder: len(held) for holder, held in expected.items()
    }
    for request in requests:
        keys = _keys(request)[:40]
        assert table.match(keys) == _known(
            {holder: _num_leading(keys, held) for holder, held in expected.items()}
        )
        assert table.match_ends(keys) == _known(
            {holder: _last(keys, held) for holder, held in expected.items()}
        )


@pytest.mark.parametrize("num_first", [300, 460, 620, 760, 1100, 1500])
@pytest.mark.parametrize("num_then", [800, 2000, 4096])
def test_a_large_batch_finds_room_after_small_ones(num_first: int, num_then: int) -> None:
    """The next table was sized for a small batch: a full one would be searched for ever."""
    table = HolderTable()
    for first in range(0, num_first, 20):
        table.add("n0", KEYS[first : first + 20])

    table.add("n0", KEYS[num_first : num_first + num_then])

    assert table.match(KEYS[: num_first + num_then]) == {"n0": num_first + num_then}


def _keys(part: tuple[int, int]) -> Keys:
    first, count = part
    return KEYS[first : first + count]


def _num_leading(keys: Keys, held: set[int]) -> int:
    return next((n for n, key in enumerate(keys.tolist()) if key not in held), len(keys))


def _last(keys: Keys, held: set[int]) -> int:
    return max((n + 1 for n, key in enumerate(keys.tolist()) if key in held), default=0)


def _known(matched: dict[str, int]) -> dict[str, int]:
    return {holder: count for holder, count in matched.items() if count}
