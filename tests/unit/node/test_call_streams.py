"""Node side of a router's call stream, without gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager

from baton.core.legs import LegKind
from baton.node.call_streams import CallContext, serve_calls
from baton.rpc.messages.limits import MAX_BATCH_BYTES
from baton.v1 import node_pb2

PATIENCE_S = 30


class Counter:
    """Count of calls in progress."""

    def __init__(self) -> None:
        self.number = 0

    @contextmanager
    def count(self, kind: LegKind) -> Iterator[None]:
        self.number += 1
        try:
            yield
        finally:
            self.number -= 1


async def starts(number: int) -> AsyncIterator[node_pb2.ServeRequest]:
    order = node_pb2.LegOrder(kind=node_pb2.LEG_KIND_DECODE)
    for call in range(number):
        yield node_pb2.ServeRequest(call=call, start=order)


async def one_token(
    kind: LegKind, order: node_pb2.LegOrder, context: CallContext
) -> AsyncGenerator[node_pb2.CallEvent, None]:
    yield node_pb2.CallEvent(output=node_pb2.TokenOutput(token_ids=[1]))


def test_a_call_counts_until_its_last_event_is_written() -> None:
    """A draining node closes its server as soon as no call counts."""

    async def scenario() -> None:
        counter = Counter()
        batches = serve_calls(starts(1), one_token, counter.count, asyncio.Event().wait)

        events = [event async for event in _up_to_the_end(batches)]
        assert counter.number == 1  # taken, and not written yet

        assert await anext(batches, None) is None
        assert [event.HasField("end") for event in events] == [False, True]
        assert counter.number == 0

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


async def _up_to_the_end(
    batches: AsyncIterator[list[node_pb2.CallEvent]],
) -> AsyncIterator[node_pb2.CallEvent]:
    async for events in batches:
        for event in events:
            yield event
        if events[-1].HasField("end"):
            return


def test_events_beyond_the_message_size_are_split() -> None:
    part = "x" * (MAX_BATCH_BYTES // 3)

    async def long_winded(
        kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        yield node_pb2.CallEvent(output=node_pb2.TokenOutput(error=part))

    async def scenario() -> list[list[node_pb2.CallEvent]]:
        return [
            events
            async for events in serve_calls(
                starts(9), long_winded, Counter().count, asyncio.Event().wait
            )
        ]

    batches = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))

    assert (
        max(sum(event.ByteSize() for event in events[:-1]) for events in batches) < MAX_BATCH_BYTES
    )
    assert sum(map(len, batches)) == 18
    assert len(batches) < 9


def test_the_stream_of_a_drained_node_ends_after_its_last_event() -> None:
    """The router has not closed its side, and gRPC would drop what it has not read yet."""

    async def scenario() -> list[node_pb2.CallEvent]:
        is_drained = asyncio.Event()

        async def open_requests() -> AsyncIterator[node_pb2.ServeRequest]:
            async for request in starts(2):
                yield request
            is_drained.set()
            await asyncio.Event().wait()

        batches = serve_calls(open_requests(), one_token, Counter().count, is_drained.wait)
        return [event async for events in batches for event in events]

    events = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))

    assert sorted((event.call, event.HasField("end")) for event in events) == [
        *((0, False), (0, True)),
        *((1, False), (1, True)),
    ]


def test_closing_a_stream_cancels_its_calls() -> None:
    ended = asyncio.Event()

    async def endless(
        kind: LegKind, order: node_pb2.LegOrder, context: CallContext
    ) -> AsyncGenerator[node_pb2.CallEvent, None]:
        try:
            yield node_pb2.CallEvent()
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def scenario() -> None:
        counter = Counter()
        batches = serve_calls(starts(1), endless, counter.count, asyncio.Event().wait)
        await anext(batches)

        await batches.aclose()

        assert ended.is_set()
        assert counter.number == 0

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
