"""Backoff and limit of the restarts of a node."""

from __future__ import annotations

from baton.cli.commands.node_restarts import MAX_DELAY_S, MAX_RESTARTS, STABLE_S, RestartBackoff


def test_the_restart_delay_grows_until_the_limit_of_restarts() -> None:
    backoff = RestartBackoff()
    delays_s = [backoff.next_delay_s(0.0) for _ in range(MAX_RESTARTS + 1)]

    assert delays_s == [1.0, 2.0, 4.0, 8.0, 16.0, None]
    assert all(delay_s is None or delay_s <= MAX_DELAY_S for delay_s in delays_s)


def test_serving_for_a_while_resets_the_restart_delay() -> None:
    backoff = RestartBackoff()
    for _ in range(MAX_RESTARTS):
        backoff.next_delay_s(0.0)
    backoff.note_up(10.0)

    assert backoff.next_delay_s(10.0 + STABLE_S) == 1.0


def test_a_node_that_crashes_soon_after_each_start_reaches_the_restart_limit() -> None:
    backoff = RestartBackoff()
    for number in range(MAX_RESTARTS):
        backoff.note_up(float(number))
        assert backoff.next_delay_s(number + 0.5) is not None

    assert backoff.next_delay_s(60.0) is None
