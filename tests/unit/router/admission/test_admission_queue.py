"""AdmissionControl queue: order, limits, waiting times and cancellation."""

from __future__ import annotations

import asyncio

import pytest

from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingParams
from baton.router.admission.admission import AdmissionControl
from baton.router.admission.admission_queue import (
    MAX_RETRY_AFTER_S,
    AdmissionQueue,
    AdmissionQueueConfig,
)
from baton.router.request_scope import RequestContext
from baton.router.values import GenerateCall, TokenPrompt
from baton.rpc.errors import QueueFull


def a_line(max_in_flight: int = 1, max_queue: int = 2) -> AdmissionQueue[str]:
    return AdmissionQueue(AdmissionQueueConfig(max_in_flight, max_queue))


def test_requests_are_admitted_then_queued_then_refused() -> None:
    line = a_line(max_in_flight=2, max_queue=1)

    admitted = [line.join(key, 0) for key in "abc"]

    assert admitted == [True, True, False]
    with pytest.raises(QueueFull, match="2 requests are under way and 1 wait"):
        line.join("d", 0)


def test_the_queue_keeps_the_order_of_arrival() -> None:
    line = a_line()
    for key in "abc":
        line.join(key, 0)

    assert [line.leave("a", 1.0), line.leave("b", 2.0), line.leave("c", 3.0)] == ["b", "c", None]


def test_a_lower_priority_number_is_admitted_first_regardless_of_arrival() -> None:
    line = a_line(max_queue=3)
    line.join("a", 0)
    for key, priority in (("low", 5), ("high", -1), ("middle", 0)):
        line.join(key, priority)

    order = [line.leave("a", 0.0), line.leave("high", 0.0), line.leave("middle", 0.0)]

    assert order == ["high", "middle", "low"]


def test_a_request_cancelled_in_the_queue_frees_its_slot_and_is_never_admitted() -> None:
    line = a_line()
    for key in "abc":
        line.join(key, 0)

    nobody = line.leave("b", 0.0)
    line.join("d", 0)

    assert nobody is None
    assert line.leave("a", 0.0) == "c"
    assert line.leave("c", 0.0) == "d"


def test_many_cancelled_requests_leave_no_state() -> None:
    line = a_line()
    line.join("a", 0)
    for number in range(1000):
        line.join(f"x{number}", 0)
        line.leave(f"x{number}", 0.0)

    assert line.num_waiting == 0
    assert line.leave("a", 1.0) is None


def test_the_retry_delay_follows_the_completion_rate_and_the_queue_length() -> None:
    line = a_line(max_queue=10)
    for number in range(100):
        line.join(f"x{number}", 0)
        line.leave(f"x{number}", 0.2 * number)
    short = line.retry_after_s()
    for number in range(4):
        line.join(f"y{number}", 0)

    assert short == pytest.approx(0.2, rel=0.05)
    assert line.retry_after_s() == pytest.approx(0.2 * 4, rel=0.05)


def test_the_retry_delay_is_bounded() -> None:
    line = a_line()
    for number in range(100):
        line.join(f"x{number}", 0)
        line.leave(f"x{number}", 10_000.0 * number)

    assert line.retry_after_s() == MAX_RETRY_AFTER_S


@pytest.mark.parametrize(("in_flight", "queue"), [(0, 1), (1, -1)])
def test_limits_that_admit_no_request_are_refused(in_flight: int, queue: int) -> None:
    with pytest.raises(InvalidConfig):
        AdmissionQueueConfig(in_flight, queue)


def test_a_request_cancelled_while_being_admitted_passes_its_slot_on() -> None:
    async def three() -> None:
        admission = AdmissionControl(AdmissionQueueConfig(1, 5), clock=lambda: 0.0)
        call = GenerateCall("a", TokenPrompt((1,)), SamplingParams())
        done = asyncio.Event()

        async def take_turn(until: asyncio.Event | None = None) -> None:
            async with admission.turn(call, RequestContext(0.0)):
                if until is not None:
                    await until.wait()

        first = asyncio.ensure_future(take_turn(done))
        second = asyncio.ensure_future(take_turn(done))
        third = asyncio.ensure_future(take_turn())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])  # second is admitted now, and has not run since
        second.cancel()
        await asyncio.wait_for(third, timeout=30)
        assert (admission.queue.num_in_flight, admission.queue.num_waiting) == (0, 0)

    asyncio.run(three())


def an_open_line(max_queue: int = 9) -> AdmissionQueue[str]:
    return AdmissionQueue(AdmissionQueueConfig(max_queue=max_queue))


def test_the_limit_follows_the_concurrency_of_the_nodes() -> None:
    line = an_open_line()
    line.resize(2)

    assert [line.join(key, 0) for key in "abcd"] == [True, True, False, False]
    assert line.resize(3) == ["c"]
    assert (line.num_in_flight, line.num_waiting) == (3, 1)


def test_a_lowered_limit_evicts_nothing_and_admits_nothing_until_slots_are_free() -> None:
    line = an_open_line()
    line.resize(3)
    for key in "abcd":
        line.join(key, 0)

    assert line.resize(1) == []
    assert [line.leave(key, 1.0) for key in "abc"] == [None, None, "d"]


def test_without_decode_nodes_the_queue_is_unchanged() -> None:
    line = an_open_line()
    line.resize(1)

    assert line.resize(0) == []
    assert [line.join(key, 0) for key in "ab"] == [True, False]


def test_a_configured_limit_overrides_the_concurrency_of_the_nodes() -> None:
    line = a_line(max_in_flight=1)

    line.resize(100)

    assert [line.join(key, 0) for key in "ab"] == [True, False]
