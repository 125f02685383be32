"""Client side of the multiplexed stream to a node, which carries all calls of this router.

One message holds the output of a whole engine step for all requests (ADR 0023).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from google.rpc import status_pb2
from grpc import StatusCode, aio

from baton.rpc.errors import MessageTooLarge
from baton.rpc.messages.limits import MAX_EVENT_BYTES
from baton.rpc.status import (
    TOO_LARGE,
    TOO_LARGE_ADVICE,
    RemoteError,
    RemoteFailure,
    remote_error,
    remote_error_in,
)
from baton.v1 import node_pb2

ENDED = RemoteError(StatusCode.UNAVAILABLE, "the node ended the stream")
CLOSED = RemoteError(StatusCode.UNAVAILABLE, "the router closed the stream")
LATE = RemoteError(StatusCode.DEADLINE_EXCEEDED, "the node did not report the deadline in time")

Method = aio.StreamStreamMultiCallable[node_pb2.ServeRequest, node_pb2.ServeResponse]
# Receives each event as soon as it is read; must not block. An exception from it ends the call.
Take = Callable[[node_pb2.CallEvent], None]


class NodeStream:
    """Stream to a node, opened by the first call and reopened by the next one after it broke."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._numbers = itertools.count(1)
        self._stream: _Stream | None = None

    async def call(
        self, order: node_pb2.LegOrder, take: Take, timeout_s: float | None = None
    ) -> None:
        """Start a call and return when it has ended. Cancellation cancels it on the node.

        Raises RemoteFailure, also if the stream breaks, and MessageTooLarge.
        """
        number = next(self._numbers)
        if timeout_s is not None:
            order.context.timeout_s = timeout_s
        request = node_pb2.ServeRequest(call=number, start=order)
        if request.ByteSize() > MAX_EVENT_BYTES:
            sizes = f"{request.ByteSize()} vs. {MAX_EVENT_BYTES}"
            raise MessageTooLarge(f"{TOO_LARGE} ({sizes}); {TOO_LARGE_ADVICE}")
        if self._stream is None or self._stream.is_over:
            self._stream = _Stream(self._method)
        stream, call = self._stream, _PendingCall(take)
        # The node enforces the deadline; the timer covers a node that does not respond.
        timer = None if timeout_s is None else call.loop.call_later(timeout_s, call.fail, LATE)
        stream.begin(number, request, call)
        try:
            await call.ended
        finally:
            if timer is not None:
                timer.cancel()
            stream.end(number)

    def close_when_idle(self) -> None:
        """Close the stream once the calls in flight have ended. No new call may follow."""
        if self._stream is not None:
            self._stream.close_when_idle()

    async def closed(self) -> None:
        """Wait until the stream has ended and its calls have failed or ended."""
        if self._stream is not None:
            await self._stream.over()


class _PendingCall:
    def __init__(self, take: Take) -> None:
        self.loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self._take = take

    def handle(self, event: node_pb2.CallEvent) -> bool:
        """Deliver an event. Return whether it was the last one."""
        if self.ended.done():
            return False  # the waiter has been scheduled
        if event.HasField("end"):
            self._end(event.end.status)
            return True
        try:
            self._take(event)
        except Exception as error:  # noqa: BLE001 - raised again by the waiter
            self.ended.set_exception(error)
        return False

    def fail(self, remote: RemoteError) -> None:
        if not self.ended.done():
            self.ended.set_exception(RemoteFailure(remote))

    def _end(self, status: bytes) -> None:
        if status:
            self.fail(remote_error_in(status_pb2.Status.FromString(status)))
        else:
            self.ended.set_result(None)


class _Stream:
    """One gRPC stream, until it breaks."""

    def __init__(self, method: Method) -> None:
        self._calls: dict[int, _PendingCall] = {}  # that the node has not ended
        self._requests: asyncio.Queue[node_pb2.ServeRequest | None] = asyncio.Queue()
        self._is_closing = False
        self._reading = asyncio.ensure_future(self._read(method(self._pop_requests())))
        self.is_over = False

    def begin(self, number: int, request: node_pb2.ServeRequest, call: _PendingCall) -> None:
        self._calls[number] = call
        self._requests.put_nowait(request)

    def end(self, number: int) -> None:
        """Cancel the call on the node, unless the node has ended it."""
        if self._calls.pop(number, None) is not None:
            cancel = node_pb2.ServeRequest(call=number, cancel=node_pb2.CancelOrder())
            self._requests.put_nowait(cancel)
        self._close_if_due()

    def close_when_idle(self) -> None:
        self._is_closing = True
        self._close_if_due()

    async def over(self) -> None:
        await asyncio.wait([self._reading])

    def _close_if_due(self) -> None:
        if self._is_closing and not self._calls:
            self._requests.put_nowait(None)

    async def _pop_requests(self) -> AsyncIterator[node_pb2.ServeRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def _read(self, stream: aio.StreamStreamCall[Any, Any]) -> None:
        failure = ENDED
        try:
            async for response in stream:
                for event in response.events:
                    call = self._calls.get(event.call)
                    if call is not None and call.handle(event):
                        del self._calls[event.call]
        except grpc.RpcError as error:
            failure = remote_error(error)
        except asyncio.CancelledError:
            failure = CLOSED
            raise
        finally:
            self._break(failure)

    def _break(self, failure: RemoteError) -> None:
        self.is_over = True
        self._requests.put_nowait(None)
        for call in self._calls.values():
            call.fail(failure)
        self._calls.clear()
