"""The gate of nodes in tests: a thread that stands still there does not hold up the other one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Event

import pytest

from baton.engine.runner.model_info import PassHook
from baton.kv_transfer.fence import Fence
from tests.support.engine_nodes import WAIT_S, Gate, Hold, Place


class SlowHook:
    """Hook of a pass that calls it until the test goes on."""

    def __init__(self) -> None:
        self.is_called, self.goes_on = Event(), Event()

    def layer_done(self, layer: int, fence: Fence) -> None:
        self.is_called.set()
        assert self.goes_on.wait(WAIT_S)

    def pass_done(self) -> None:
        """Do nothing."""


class TwoThreads:
    """A thread of passes and an engine thread, which posts writes."""

    def __init__(self) -> None:
        self.test, theirs = Pipe()
        self._gate = Gate(theirs)
        self._theirs = theirs
        self._threads = {place: ThreadPoolExecutor(1) for place in Place}

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self.test.close()
        self._theirs.close()

    def go(self, place: Place, hook: PassHook | None = None) -> Future[None]:
        return self._threads[place].submit(self._gate.advance_to, place, hook)


@pytest.fixture
def threads() -> Iterator[TwoThreads]:
    made = TwoThreads()
    yield made
    made.close()


def await_held(test: Connection) -> None:
    assert test.poll(WAIT_S)
    assert test.recv() == "held"


@pytest.mark.parametrize("held", list(Place))
def test_the_other_thread_passes_and_leaves_the_release_alone(
    threads: TwoThreads, held: Place
) -> None:
    [other] = [place for place in Place if place is not held]
    hook = SlowHook()
    threads.test.send(Hold(held, 2, moves_bytes=True))
    threads.go(held).result(WAIT_S)
    standing = threads.go(held, hook)
    await_held(threads.test)
    assert hook.is_called.wait(WAIT_S)

    threads.test.send("go")
    for _ in range(3):
        threads.go(other).result(WAIT_S)
    assert not standing.done()
    hook.goes_on.set()
    standing.result(WAIT_S)

    threads.test.send(Hold(other, 1))
    standing = threads.go(other)
    await_held(threads.test)
    threads.test.send("go")
    standing.result(WAIT_S)


def test_each_passage_counts_once(threads: TwoThreads) -> None:
    num_passages = 200
    threads.test.send(Hold(Place.PASS, num_passages + 1))

    passages = [threads.go(place) for _ in range(num_passages) for place in Place]
    for passage in passages:
        passage.result(WAIT_S)
    standing = threads.go(Place.PASS)

    await_held(threads.test)
    threads.test.send("go")
    standing.result(WAIT_S)
