"""Generate calls of a gateway that end, fail or are aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from baton.router.doors.smg.servicer import RunningCalls
from baton.rpc.errors import NodeFailed, RequestIdInUse


@dataclass
class Stream:
    """Stream that yields numbers, fails or waits for ever, and notes its end."""

    items: Sequence[int]
    failure: Exception | None = None
    is_endless: bool = False
    is_waiting: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                yield item
            if self.failure is not None:
                raise self.failure
            if self.is_endless:
                self.is_waiting.set()
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.has_ended = True


def run(scenario: Callable[[RunningCalls], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await scenario(RunningCalls())

    asyncio.run(within())


def test_items_are_passed_on_to_the_end() -> None:
    async def scenario(calls: RunningCalls) -> None:
        for _ in range(2):  # the id is free again
            stream = Stream([1, 2, 3])
            assert [item async for item in calls.until_aborted("a", "", stream.run())] == [1, 2, 3]
            assert stream.has_ended

    run(scenario)


@pytest.mark.parametrize("failure", [NodeFailed("dead"), TimeoutError("dead")])
def test_a_failure_is_passed_on(failure: Exception) -> None:
    async def scenario(calls: RunningCalls) -> None:
        stream = Stream([1], failure)
        with pytest.raises(type(failure), match="dead"):
            async for _ in calls.until_aborted("a", "", stream.run()):
                pass
        assert stream.has_ended

    run(scenario)


def test_an_abort_ends_a_wait() -> None:
    async def scenario(calls: RunningCalls) -> None:
        stream = Stream([1], is_endless=True)

        async def read() -> list[int]:
            return [item async for item in calls.until_aborted("a", "me", stream.run())]

        reading = asyncio.ensure_future(read())
        await stream.is_waiting.wait()
        calls.abort("a", "another owner")
        calls.abort("b", "me")
        await asyncio.sleep(0)
        assert not reading.done()
        calls.abort("a", "me")
        calls.abort("a", "me")
        assert await reading == [1]
        assert stream.has_ended
        calls.abort("a", "me")

    run(scenario)


def test_an_abort_ends_a_request_between_two_items() -> None:
    async def scenario(calls: RunningCalls) -> None:
        stream = Stream(range(5))
        async with aclosing(calls.until_aborted("a", "", stream.run())) as items:
            assert await anext(items) == 0
            with pytest.raises(RequestIdInUse, match="'a' is under way"):
                await anext(calls.until_aborted("a", "", Stream([]).run()))
            calls.abort("a", "")
            assert [item async for item in items] == []
        assert stream.has_ended

    run(scenario)


def test_a_reader_that_leaves_ends_the_stream() -> None:
    async def scenario(calls: RunningCalls) -> None:
        stream = Stream(range(1000))
        async with aclosing(calls.until_aborted("a", "", stream.run())) as items:
            await anext(items)
        assert stream.has_ended

    run(scenario)
