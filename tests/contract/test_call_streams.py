"""Concurrent calls on one router-node stream over real gRPC: they do not affect each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc import StatusCode

from baton.router.dispatch.node_calls import Connection, NodeStream
from baton.rpc.channel import open_channel
from baton.rpc.errors import GenerationFailed
from baton.rpc.status import RemoteFailure
from baton.v1 import node_pb2, node_pb2_grpc
from tests.support.scripted_node import ScriptedCall, ScriptedNode, serve_scripted_node

PATIENCE_S = 30
ORDER = node_pb2.LegOrder(kind=node_pb2.LEG_KIND_DECODE)


def play(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, PATIENCE_S))


@asynccontextmanager
async def connected(node: ScriptedNode) -> AsyncIterator[NodeStream]:
    async with serve_scripted_node(node) as address:
        connection = Connection(open_channel(address))
        yield connection.legs
        await connection.close()


class RouterCall:
    """Call of the router, with the events that it receives."""

    def __init__(self, stream: NodeStream) -> None:
        self.events: list[node_pb2.CallEvent] = []
        self.task = asyncio.ensure_future(stream.call(ORDER, self.events.append))

    @property
    def places(self) -> list[int]:
        return [event.output.first_index for event in self.events]


async def start_call(stream: NodeStream, node: ScriptedNode) -> tuple[RouterCall, ScriptedCall]:
    requested = RouterCall(stream)
    return requested, await node.calls.get()


def test_each_call_gets_its_own_events_in_order_until_its_end() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            (one, node_one), (two, node_two) = (
                await start_call(stream, node),
                await start_call(stream, node),
            )

            node_one.send_tokens(0)
            node_two.send_tokens(5, 6)
            node_one.send_tokens(1, 2)
            node_two.end()
            await two.task
            assert not one.task.done()
            node_one.end()
            await one.task

            assert (one.places, two.places) == ([0, 1, 2], [5, 6])
            assert node.num_streams == 1

    play(scenario())


def test_simultaneous_events_of_all_calls_are_sent_in_one_message() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            calls = [await start_call(stream, node) for _ in range(20)]

            for _, reported in calls:
                reported.send_tokens(0)
                reported.end()
            await asyncio.gather(*(requested.task for requested, _ in calls))

            assert sum(node.messages) == 40
            assert len(node.messages) <= 3

    play(scenario())


def test_cancelling_a_call_ends_only_that_call_on_the_node() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            (one, node_one), (two, node_two) = (
                await start_call(stream, node),
                await start_call(stream, node),
            )

            one.task.cancel()
            await node_one.left.wait()

            assert not node_two.left.is_set()
            node_two.send_tokens(0)
            node_two.end()
            await two.task
            assert two.places == [0]

    play(scenario())


def test_a_failed_call_reports_its_reason_and_affects_no_other() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            (one, node_one), (two, node_two) = (
                await start_call(stream, node),
                await start_call(stream, node),
            )

            node_one.send_tokens(0)
            node_one.end(GenerationFailed("the engine says no"))
            with pytest.raises(RemoteFailure) as failure:
                await one.task

            remote = failure.value.remote
            assert (remote.code, remote.reason) == (StatusCode.INTERNAL, "GENERATION_FAILED")
            assert (remote.message, remote.metadata) == ("the engine says no", {"node_id": "d"})
            assert one.places == [0]
            node_two.end()
            await two.task

    play(scenario())


def test_an_exception_in_one_call_is_reported_and_ends_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            (one, node_one), (two, node_two) = (
                await start_call(stream, node),
                await start_call(stream, node),
            )

            node_one.end(ZeroDivisionError("oh"))
            with pytest.raises(RemoteFailure, match="ZeroDivisionError: oh"):
                await one.task

            node_two.end()
            await two.task

    play(scenario())
    assert "a call ended on a bug" in caplog.text


def test_a_draining_node_refuses_new_calls_and_finishes_running_ones() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            old, old_on_node = await start_call(stream, node)
            node.is_draining = True

            with pytest.raises(RemoteFailure) as refusal:
                await RouterCall(stream).task

            assert refusal.value.remote.reason == "DRAINING"
            old_on_node.send_tokens(0)
            old_on_node.end()
            await old.task
            assert old.places == [0]

    play(scenario())


def test_a_call_that_a_drained_node_has_not_started_is_refused_as_draining() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with connected(node) as stream:
            node.has_drained.set()

            with pytest.raises(RemoteFailure) as refusal:
                await RouterCall(stream).task

            assert refusal.value.remote.reason == "DRAINING"
            assert node.calls.empty()

    play(scenario())


def test_a_stopped_node_fails_every_call_and_the_next_call_reconnects() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with serve_scripted_node(node) as address:
            connection = Connection(open_channel(address))
            calls = [await start_call(connection.legs, node) for _ in range(3)]
        for requested, reported in calls:
            with pytest.raises(RemoteFailure) as failure:
                await requested.task
            assert failure.value.remote.code in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
            assert reported.left.is_set()

        again = ScriptedNode()
        async with serve_scripted_node(again, port=int(address.rpartition(":")[2])):
            await connection.channel.channel_ready()
            retry, reported = await start_call(connection.legs, again)
            reported.send_tokens(7)
            reported.end()
            await retry.task
            assert retry.places == [7]
            await connection.close()

    play(scenario())


def test_a_disconnected_router_ends_all_its_calls_on_the_node() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with serve_scripted_node(node) as address:
            connection = Connection(open_channel(address))
            calls = [await start_call(connection.legs, node) for _ in range(3)]

            await connection.close()

            for requested, reported in calls:
                await reported.left.wait()
                with pytest.raises(RemoteFailure, match="closed"):
                    await requested.task
            await node.stream_ended.wait()
            assert node.num_under_way == 0

    play(scenario())


def test_a_released_connection_closes_after_its_last_call() -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with serve_scripted_node(node) as address:
            connection = Connection(open_channel(address))
            requested, reported = await start_call(connection.legs, node)

            closing = asyncio.ensure_future(connection.close(PATIENCE_S))
            reported.send_tokens(0)
            reported.end()
            await requested.task
            await closing
            await node.stream_ended.wait()

            assert requested.places == [0]

    play(scenario())


@pytest.mark.parametrize(
    ("nonsense", "reason"),
    [
        (node_pb2.ServeRequest(call=1, start=ORDER), "call 1 is under way"),
        (node_pb2.ServeRequest(call=2), "neither `start` nor `cancel`"),
    ],
    ids=["a number in use", "no order"],
)
def test_an_invalid_message_of_a_router_ends_its_stream(
    nonsense: node_pb2.ServeRequest, reason: str
) -> None:
    async def scenario() -> None:
        node = ScriptedNode()
        async with serve_scripted_node(node) as address, open_channel(address) as channel:
            stream = node_pb2_grpc.LegServiceStub(channel).Serve()
            await stream.write(node_pb2.ServeRequest(call=1, start=ORDER))
            under_way = await node.calls.get()

            await stream.write(nonsense)

            assert await stream.code() is StatusCode.INVALID_ARGUMENT
            assert reason in (await stream.details() or "")
            await under_way.left.wait()

    play(scenario())
