"""Merged streams of a gateway's request: order, ends, failures and aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from baton.core.errors import InvalidConfig
from baton.rpc.errors import NodeFailed, RequestIdInUse
from baton.rpc.smg import installed
from baton.rpc.smg.call_streams import CallStreams
from tests.support.waits import until

LAST = 9


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


def run(scenario: Callable[[CallStreams[int]], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(10):
            await scenario(CallStreams(lambda item: item == LAST))

    asyncio.run(within())


def test_streams_are_merged_up_to_their_last_items() -> None:
    async def scenario(calls: CallStreams[int]) -> None:
        streams = [Stream([1, 2, LAST], is_endless=True), Stream([3]), Stream([LAST])]
        merged = [item async for item in calls.merge("a", [one.run() for one in streams])]
        assert sorted(merged) == [(0, 1), (0, 2), (0, LAST), (1, 3), (2, LAST)]
        assert [item for index, item in merged if index == 0] == [1, 2, LAST]
        # The first stream goes on until it is aborted.
        assert not streams[0].has_ended.is_set()
        assert not calls.abort("a", "another owner")
        assert calls.abort("a")
        await streams[0].has_ended.wait()
        await until(lambda: not calls.abort("a"), what="its task has ended")

    run(scenario)


def test_a_failure_ends_all_streams() -> None:
    async def scenario(calls: CallStreams[int]) -> None:
        streams = [Stream([1], NodeFailed("dead")), Stream([2], is_endless=True)]
        with pytest.raises(NodeFailed, match="dead"):
            async for _ in calls.merge("a", [one.run() for one in streams]):
                pass
        assert streams[1].has_ended.is_set()
        assert not calls.abort("a")

    run(scenario)


def test_an_abort_ends_the_merge_early() -> None:
    async def scenario(calls: CallStreams[int]) -> None:
        stream = Stream(range(5), is_endless=True)
        async with aclosing(calls.merge("a", [stream.run()])) as merged:
            assert await anext(merged) == (0, 0)
            with pytest.raises(RequestIdInUse, match="'a' is under way"):
                await anext(calls.merge("a", []))
            calls.abort("a")
            assert [item async for item in merged] in ([], [(0, 1)])
        assert stream.has_ended.is_set()

    run(scenario)


def test_streams_wait_for_the_reader_and_end_with_it() -> None:
    async def scenario(calls: CallStreams[int]) -> None:
        stream = Stream(range(1000))
        async with aclosing(calls.merge("a", [stream.run()])) as merged:
            await anext(merged)
            for _ in range(50):
                await asyncio.sleep(0)
            assert stream.num_taken <= 3
        assert stream.has_ended.is_set()

    run(scenario)


def test_the_option_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"pip install 'baton\[smg\]'"):
        installed.check_installed()
