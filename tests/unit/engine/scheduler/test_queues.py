"""Waiting queues: order, and removal from the middle."""

from __future__ import annotations

import weakref

from baton.engine.kv_arrival.fills import FillId
from baton.engine.scheduler.queues import RankedQueue, WaitingQueue
from baton.engine.scheduler.request import Request
from tests.support.function_calls import count_calls
from tests.support.requests import make_request


def test_the_queue_is_ordered_by_key_and_then_by_arrival() -> None:
    queue = RankedQueue()
    late, first, second = (make_request(request_id=name) for name in ("late", "first", "second"))
    queue.push((2,), late)
    queue.push((1,), first)
    queue.push((1,), second)

    assert _drain(queue) == [first, second, late]


def test_removing_a_request_keeps_the_order_of_the_others() -> None:
    queue = RankedQueue()
    requests = [make_request(request_id=str(n)) for n in range(200)]
    for number, request in enumerate(requests):
        queue.push((number,), request)

    for request in requests[10:190]:
        queue.remove(request)

    assert set(queue) == set(requests[:10] + requests[190:])
    assert _drain(queue) == requests[:10] + requests[190:]


def test_a_request_removed_and_added_again_is_queued_once() -> None:
    queue = RankedQueue()
    request = make_request()
    queue.push((1,), request)
    queue.remove(request)
    queue.push((2,), request)

    assert len(queue) == len(list(queue)) == 1
    assert queue.peek() == ((2,), request)


def test_resumed_requests_precede_new_ones_of_the_same_priority_only() -> None:
    line = WaitingQueue()
    resumed = make_request(request_id="resumed", priority=1, serial=9)
    new = make_request(request_id="new", priority=1, serial=1)
    urgent = make_request(request_id="urgent", priority=0, serial=10)
    line.push(new)
    line.push(urgent)
    resumed.is_resumed = True
    line.push(resumed)

    assert _drain_line(line) == [urgent, resumed, new]


def test_requests_that_lack_a_grant_come_last_whatever_their_priority() -> None:
    line = WaitingQueue()
    urgent, long, lax = (make_request(request_id=str(n), priority=n, serial=n) for n in range(3))
    for request in (urgent, long, lax):
        request.lacks_grant = True
        line.push(request)
    line.set_aside(long)

    for request in (lax, long):
        request.lacks_grant = False
        line.note_grant(request)

    assert _drain_line(line) == [long, lax, urgent]


def test_a_grant_does_not_end_the_wait_for_a_fill() -> None:
    line = WaitingQueue()
    request = make_request()
    request.lacks_grant = True
    line.push(request)
    line.follow(request, FillId(1), 9.0)

    request.lacks_grant = False
    line.note_grant(request)

    assert line.head() is None
    line.release_followers(FillId(1))
    assert line.head() is request


def test_followers_return_to_the_queue_when_their_fill_ends_or_at_their_deadlines() -> None:
    line = WaitingQueue()
    first, second, third = (make_request(request_id=str(n), serial=n) for n in range(3))
    third.is_resumed = True
    for request, until_s in ((first, 3.0), (second, 2.0), (third, 9.0)):
        line.push(request)
        line.follow(request, FillId(1), until_s)

    early = line.release_overdue(1.9), line.head()
    is_overdue, overdue = line.release_overdue(2.0), line.head()
    line.release_followers(FillId(1))

    assert early == (False, None)
    assert (is_overdue, overdue) == (True, second)
    assert not line.release_overdue(99.0)
    assert _drain_line(line) == [third, first, second]


def test_a_long_prompt_set_aside_keeps_its_queue_position() -> None:
    line = WaitingQueue()
    long, short = make_request(request_id="long", serial=1), make_request(request_id="s", serial=2)
    line.push(long)
    line.push(short)

    line.set_aside(long)

    assert line.head(allow_long=False) is short
    assert line.head(allow_long=True) is long
    assert len(line) == 2


def test_a_deferred_request_can_be_removed() -> None:
    line = WaitingQueue()
    long = make_request()
    line.push(long)
    line.set_aside(long)

    line.remove(long)

    assert len(line) == 0
    assert line.head() is None


class Client(str):
    """Name of a client, of which the objects that are kept can be counted."""


def test_clients_that_come_and_go_behind_a_head_leave_nothing_behind() -> None:
    line = WaitingQueue()
    head = make_request(request_id="head", client="patient")
    line.push(head)
    clients: weakref.WeakSet[Client] = weakref.WeakSet()

    for number in range(1, 1000):
        client = Client(number)
        clients.add(client)
        request = make_request(request_id=client, serial=number, client=client)
        line.push(request)
        assert line.head() is head
        line.remove(request)
        del request, client

    assert len(clients) < 100


def test_the_length_of_the_queue_is_known_however_many_clients_wait() -> None:
    line = WaitingQueue()
    calls, lengths = list[int](), list[int]()
    for number in (1, 1000):
        for client in range(number):
            name = f"{number} {client}"
            line.push(make_request(request_id=name, client=name))
        calls.append(count_calls(lambda: lengths.append(len(line))))

    assert lengths == [1, 1001]
    assert calls[0] == calls[1]


def _drain(queue: RankedQueue) -> list[Request]:
    drained = []
    while (head := queue.peek()) is not None:
        queue.remove(head[1])
        drained.append(head[1])
    return drained


def _drain_line(line: WaitingQueue) -> list[Request]:
    drained = []
    while (head := line.head()) is not None:
        line.remove(head)
        drained.append(head)
    return drained
