"""Record of what has arrived for a request."""

from __future__ import annotations

from baton.engine.kv_arrival.arrival import Arrival
from tests.support.requests import make_held, make_request


def test_a_block_that_was_pulled_and_then_loaded_has_one_source() -> None:
    request = make_request()
    request.num_prompt_tokens = request.num_cached_tokens = 10
    for start in (0, 4, 8):
        request.arrival.note_filled("peer", range(start, start + 4))
    request.arrival.note_filled("host", range(4, 8))  # evicted, and loaded again

    assert request.served().loaded_tokens == {"peer": 6, "host": 4}


def test_all_waits_of_a_request_share_one_deadline_until_it_loses_its_blocks() -> None:
    arrival = Arrival(make_held(), rank=(0, 0.0, 0))
    before_any = arrival.may_wait(99.0)
    arrival.waits_until_s = 5.0
    arrival.asked.add("external")

    assert (before_any, arrival.may_wait(4.9), arrival.may_wait(5.0)) == (True, True, False)
    arrival.restart()
    assert arrival.may_wait(99.0)
    assert not arrival.asked
