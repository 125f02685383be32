"""Admission queue against a list that is sorted each time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from baton.router.admission.admission_queue import AdmissionQueue, AdmissionQueueConfig
from baton.rpc.errors import QueueFull

joins = st.tuples(st.just("join"), st.integers(-2, 2))
leaves = st.tuples(st.just("leave"), st.integers(0, 30))


@given(
    st.integers(1, 3), st.integers(0, 4), st.integers(1, 3), st.lists(joins | leaves, max_size=80)
)
def test_limits_hold_and_the_client_with_fewest_in_flight_is_next_within_a_priority(
    max_in_flight: int, max_queue: int, num_clients: int, history: list[tuple[str, int]]
) -> None:
    line: AdmissionQueue[int] = AdmissionQueue(AdmissionQueueConfig(max_in_flight, max_queue))
    in_flight: list[int] = []
    waiting: list[tuple[int, int]] = []  # priority, key; keys rise

    for key, (what, number) in enumerate(history):
        if what == "join":
            is_full = len(in_flight) == max_in_flight and len(waiting) == max_queue
            try:
                assert line.join(key, number, str(key % num_clients)) == (
                    len(in_flight) < max_in_flight
                )
                if len(in_flight) < max_in_flight:
                    in_flight.append(key)
                else:
                    waiting.append((number, key))
                assert not is_full
            except QueueFull:
                assert is_full
        elif present := in_flight + [key for _, key in waiting]:
            leaving = present[number % len(present)]
            called = line.leave(leaving, float(key))
            expected = None
            if leaving in in_flight:
                in_flight.remove(leaving)
                if waiting:
                    busy = Counter(one % num_clients for one in in_flight)
                    first = min(waiting, key=lambda one: (one[0], busy[one[1] % num_clients], one))
                    waiting.remove(first)
                    expected = first[1]
                    in_flight.append(expected)
            else:
                waiting = [one for one in waiting if one[1] != leaving]
            assert called == expected
        assert (line.num_in_flight, line.num_waiting) == (len(in_flight), len(waiting))
