"""Order of the turns of a replay of sessions, and the shares of their loads."""

from __future__ import annotations

import pytest

from benchmarks.tiers.turns import (
    DISTANCE,
    NUM_SHORT,
    SecondTurn,
    Turn,
    turn_order,
    turns_row,
)


def second(
    loaded_tokens: int = 128,
    *,
    is_long: bool = True,
    found_tokens: int = 0,
    computed_s: float = 5.0,
    ttft_s: float = 0.5,
) -> SecondTurn:
    return SecondTurn(is_long, 128, found_tokens, loaded_tokens, computed_s, ttft_s)


def test_each_session_has_two_turns_with_first_turns_of_others_between_them() -> None:
    order = list(turn_order(8))

    assert len(order) == len(set(order)) == 16 * (1 + NUM_SHORT)
    for is_long in (True, False):
        first, last = (order.index(Turn(0, is_long, is_second)) for is_second in (False, True))
        between = order[first + 1 : last]
        others = [turn for turn in between if turn.is_long and not turn.is_second]
        assert len(others) == DISTANCE


def test_second_turns_of_short_sessions_follow_a_long_prompt() -> None:
    order = list(turn_order(8))

    for place, turn in enumerate(order):
        if turn.is_long and not turn.is_second and turn.session >= DISTANCE:
            after = order[place + 1 : place + 1 + NUM_SHORT]
            assert [each.is_long or not each.is_second for each in after] == [False] * NUM_SHORT


def test_a_prefix_computed_instead_of_loaded_is_a_skipped_load() -> None:
    seconds = [second(), second(loaded_tokens=0, ttft_s=4.0), second(is_long=False, computed_s=0.1)]

    row = turns_row("host", seconds, [])

    assert (row.turns, row.loads) == (2, 3)
    assert row.taken == pytest.approx(2 / 3)
    assert row.taken_short == 1.0
    assert row.taken_tokens == pytest.approx(2 / 3)
    assert row.share_of_5x == 0.5


def test_a_prefix_in_the_kv_cache_is_not_a_load() -> None:
    row = turns_row("host", [second(loaded_tokens=0, found_tokens=128), second()], [])

    assert (row.turns, row.loads, row.taken) == (2, 1, 1.0)


def test_a_load_of_less_than_nine_tenths_of_the_missing_tokens_is_skipped() -> None:
    row = turns_row("host", [second(loaded_tokens=64), second(64, found_tokens=64)], [])

    assert (row.loads, row.taken) == (2, 0.5)


def test_gaps_of_the_decoding_requests_are_reported_as_quantiles() -> None:
    row = turns_row("file", [second()], [0.001 * number for number in range(1, 101)])

    assert row.gap_p50_ms == pytest.approx(51.0)
    assert row.gap_p99_ms == pytest.approx(100.0)
