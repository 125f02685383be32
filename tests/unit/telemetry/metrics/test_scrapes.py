"""Metrics that are read from the thread that owns their values."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics.instruments import Reading
from baton.telemetry.metrics.names import READINGS_AGE, RUNNING
from baton.telemetry.metrics.readers import MAX_CONNECTIONS, OwnerThreadReader, metrics_server

Order = Callable[[], None]


class Owner:
    """Owner thread that executes orders at once or when it is no longer busy."""

    def __init__(self) -> None:
        self.num_running = 0
        self.is_busy = False
        self.waiting: deque[Order] = deque()

    def post(self, order: Order) -> None:
        self.waiting.append(order)
        if not self.is_busy:
            self.catch_up()

    def catch_up(self) -> None:
        while self.waiting:
            self.waiting.popleft()()

    def read(self) -> Reading:
        return {RUNNING: self.num_running}


def test_an_idle_owner_is_read_at_each_scrape() -> None:
    owner = Owner()
    read = OwnerThreadReader(owner.post, owner.read)

    before, owner.num_running = read(), 3
    after = read()

    assert before == {RUNNING: 0, READINGS_AGE: 0.0}
    assert after == {RUNNING: 3, READINGS_AGE: 0.0}


def test_the_last_reading_is_returned_with_its_age_while_the_owner_is_busy() -> None:
    owner = Owner()
    read = OwnerThreadReader(owner.post, owner.read, longest_wait_s=0.0)
    read()
    owner.is_busy, owner.num_running = True, 3

    reported = read()

    assert reported[RUNNING] == 0
    age_s = reported[READINGS_AGE]
    assert isinstance(age_s, float)
    assert age_s > 0


def test_a_busy_owner_gets_one_pending_read() -> None:
    owner = Owner()
    owner.is_busy = True
    read = OwnerThreadReader(owner.post, owner.read, longest_wait_s=0.0)

    for _ in range(3):
        assert read() == {}

    assert len(owner.waiting) == 1


def test_a_late_reading_is_returned_by_the_next_scrape() -> None:
    owner = Owner()
    read = OwnerThreadReader(owner.post, owner.read, longest_wait_s=0.0)
    owner.is_busy, owner.num_running = True, 3
    read()
    owner.catch_up()

    reported = read()

    assert reported[RUNNING] == 3
    assert len(owner.waiting) == 1


def test_connections_beyond_the_limit_of_a_metrics_server_are_closed_at_once() -> None:
    server = metrics_server(CollectorRegistry(), "127.0.0.1", 0)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    with ExitStack() as clients:
        address = ("127.0.0.1", server.server_port)
        for _ in range(MAX_CONNECTIONS):
            clients.enter_context(socket.create_connection(address))
        one_more = clients.enter_context(socket.create_connection(address))

        assert one_more.recv(1) == b""

    server.shutdown()
    server.server_close()
    serving.join()
