"""Streams of a gateway's requests: order, ends, failures and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from baton.router.doors.smg.abortable_streams import AbortableStreams
from baton.rpc.errors import NodeFailed, RequestIdInUse


@dataclass
class Stream:
    """Stream that yields numbers, fails or waits for ever, and notes its end."""

    items: Sequence[int]
    failure: Exception | None = None
    is_endless: bool = False
    num_taken: int = 0
    has_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for item in self.items:
                self.num_taken += 1
                yield item
            if self.failure is not None:
                raise self.failure
            if self.is_endless:
                await asyncio.Event().wait()
        finally:
            self.has_ended.set()


def run(scenario: Callable[[AbortableStreams[int]], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await scenario(AbortableStreams())

    asyncio.run(within())


def test_items_come_in_order_and_an_id_can_be_used_again() -> None:
    async def scenario(streams: AbortableStreams[int]) -> None:
        for _ in range(2):
            assert [item async for item in streams.run("a", Stream([1, 2, 3]).run())] == [1, 2, 3]
        streams.abort("a")

    run(scenario)


def test_a_failure_comes_after_the_items_before_it() -> None:
    async def scenario(streams: AbortableStreams[int]) -> None:
        items = streams.run("a", Stream([1], NodeFailed("dead")).run())
        assert await anext(items) == 1
        with pytest.raises(NodeFailed, match="dead"):
            await anext(items)

    run(scenario)


def test_an_abort_by_its_owner_ends_a_stream_early() -> None:
    async def scenario(streams: AbortableStreams[int]) -> None:
        stream = Stream(range(5), is_endless=True)
        async with aclosing(streams.run("a", stream.run(), "owner")) as items:
            assert await anext(items) == 0
            with pytest.raises(RequestIdInUse, match="'a' is under way"):
                await anext(streams.run("a", Stream([]).run(), "owner"))
            streams.abort("a", "another owner")
            assert await anext(items) == 1
            streams.abort("a", "owner")
            assert [item async for item in items] in ([], [2])
        assert stream.has_ended.is_set()

    run(scenario)


def test_an_abort_before_the_first_item_ends_a_stream() -> None:
    async def scenario(streams: AbortableStreams[int]) -> None:
        async with aclosing(streams.run("a", Stream([1]).run())) as items:
            first = asyncio.ensure_future(anext(items, None))
            await asyncio.sleep(0)  # its task is created, and has not begun
            streams.abort("a")
            assert await first is None

    run(scenario)


def test_streams_wait_for_the_reader_and_end_with_it() -> None:
    async def scenario(streams: AbortableStreams[int]) -> None:
        stream = Stream(range(1000))
        async with aclosing(streams.run("a", stream.run())) as items:
            await anext(items)
            for _ in range(50):
                await asyncio.sleep(0)
            assert stream.num_taken <= 3
        assert stream.has_ended.is_set()

    run(scenario)
