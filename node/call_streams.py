"""Node side of the router streams, each of which multiplexes many calls.

Events that the calls of a stream produce at the same time, such as after an engine step, are
sent as one message, because the cost per message far exceeds the cost per event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from google.rpc import code_pb2, status_pb2

from baton.core.errors import NamedError
from baton.core.legs import LegKind
from baton.rpc.errors import DeadlineExceeded, Draining, MessageTooLarge, UnsupportedInput
from baton.rpc.messages.calls import KIND
from baton.rpc.messages.limits import MAX_BATCH_BYTES, MAX_EVENT_BYTES
from baton.rpc.status import TOO_LARGE, TOO_LARGE_ADVICE, status_of
from baton.v1 import node_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallContext:
    """Metadata and deadline of one multiplexed call, as gRPC provides them for a plain call."""

    metadata: tuple[tuple[str, str], ...] = ()
    deadline_s: float | None = None  # on the monotonic clock

    def time_remaining(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()


Order = node_pb2.LegOrder
Serve = Callable[[LegKind, Order, CallContext], AsyncGenerator[node_pb2.CallEvent, None]]
# Context of one call: counts it, so that a drain can wait for its end, or raises Draining.
Count = Callable[[LegKind], AbstractContextManager[None]]
# Returns when the node has drained.
Drained = Callable[[], Coroutine[Any, Any, object]]


async def serve_calls(
    requests: AsyncIterator[node_pb2.ServeRequest],
    serve: Serve,
    count: Count,
    drained: Drained,
    **metadata: str,
) -> AsyncGenerator[list[node_pb2.CallEvent], None]:
    """Yield batches of events until the stream's last call has ended.

    The stream of a drained node ends with a status: gRPC drops messages that the router has not
    read yet if the connection of a stream breaks.

    `metadata` is attached to the status of each failed call. Closing the generator early cancels
    all calls.
    """
    calls = _Calls(serve, count, metadata)
    reading = asyncio.ensure_future(calls.read(requests))
    draining = asyncio.ensure_future(drained())
    draining.add_done_callback(lambda _: reading.cancel())
    try:
        while batch := await calls.outbox.next_batch():
            yield batch
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.result()
    finally:
        draining.cancel()
        reading.cancel()
        await asyncio.gather(reading, draining, return_exceptions=True)
        await calls.cancel_all()


class _Calls:
    """Calls of one stream. Each call runs as a task."""

    def __init__(self, serve: Serve, count: Count, metadata: dict[str, str]) -> None:
        self._serve = serve
        self._count = count
        self._metadata = metadata
        self._task_by_call: dict[int, asyncio.Task[None]] = {}
        self._is_read = False
        self.outbox = _Outbox()

    async def read(self, requests: AsyncIterator[node_pb2.ServeRequest]) -> None:
        """Start and cancel calls as requested, until the router closes its side of the stream."""
        try:
            async for request in requests:
                self._handle(request)
        except UnsupportedInput:
            self.outbox.close()  # the router violated the protocol
            raise
        finally:
            self._is_read = True
            self._close_when_idle()

    async def cancel_all(self) -> None:
        tasks = list(self._task_by_call.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _handle(self, request: node_pb2.ServeRequest) -> None:
        kind = request.WhichOneof("order")
        if kind is None:
            raise UnsupportedInput(f"call {request.call}: neither `start` nor `cancel` is set")
        task = self._task_by_call.get(request.call)
        if kind == "start" and task is not None:
            raise UnsupportedInput(f"call {request.call} is under way; use a new number per call")
        if kind == "start":
            self._start(request.call, request.start)
        elif task is not None:
            task.cancel()

    def _start(self, call: int, order: Order) -> None:
        task = asyncio.ensure_future(self._run(call, order))
        self._task_by_call[call] = task
        task.add_done_callback(lambda _: self._ended(call))

    def _ended(self, call: int) -> None:
        del self._task_by_call[call]
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._is_read and not self._task_by_call:
            self.outbox.close()

    async def _run(self, call: int, order: Order) -> None:
        try:
            kind = KIND.from_message(order.kind)
            with self._count(kind):
                self._end(call, await self._serve_to_status(call, kind, order))
                # The server can close as soon as the last call is no longer counted.
                await self.outbox.wait_until_flushed()
        except (Draining, UnsupportedInput) as refusal:
            self._end(call, status_of(refusal, self._metadata))

    async def _serve_to_status(
        self, call: int, kind: LegKind, order: Order
    ) -> status_pb2.Status | None:
        """Serve the call. Return the status of its failure, or None if it succeeded."""
        try:
            await self._forward_events(call, kind, order)
        except NamedError as error:
            return status_of(error, self._metadata)
        except Exception as bug:
            log.exception("a call ended on a bug")
            return status_pb2.Status(code=code_pb2.UNKNOWN, message=f"{type(bug).__name__}: {bug}")
        return None

    async def _forward_events(self, call: int, kind: LegKind, order: Order) -> None:
        context = _context_from(order.context)
        timer = asyncio.timeout_at(context.deadline_s)
        try:
            async with timer, aclosing(self._serve(kind, order, context)) as events:
                async for event in events:
                    event.call = call
                    self.outbox.put(event)
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineExceeded("the deadline passed before the call had ended") from None

    def _end(self, call: int, status: status_pb2.Status | None) -> None:
        serialized = b"" if status is None else status.SerializeToString()
        self.outbox.put(node_pb2.CallEvent(call=call, end=node_pb2.CallEnd(status=serialized)))


class _Outbox:
    """Queue of events to the router.

    If the router reads slowly, the queue is bounded by the answers of the calls in flight.
    """

    def __init__(self) -> None:
        self._queued: deque[tuple[node_pb2.CallEvent, int]] = deque()  # with their sizes
        self._wakeup = asyncio.Event()
        self._flushed = asyncio.Event()
        self._is_closed = False

    def put(self, event: node_pb2.CallEvent) -> None:
        """Raises MessageTooLarge: sending the event would break the stream for all calls."""
        num_bytes = event.ByteSize()
        if num_bytes > MAX_EVENT_BYTES:
            raise MessageTooLarge(
                f"{TOO_LARGE} ({num_bytes} vs. {MAX_EVENT_BYTES}); {TOO_LARGE_ADVICE}"
            )
        self._queued.append((event, num_bytes))
        self._wakeup.set()
        self._flushed.clear()

    def close(self) -> None:
        """End the stream after the events that are queued."""
        self._is_closed = True
        self._wakeup.set()

    async def wait_until_flushed(self) -> None:
        """Return when all queued events have been written."""
        await self._flushed.wait()

    async def next_batch(self) -> list[node_pb2.CallEvent]:
        """Return the queued events, up to the size limit of a message. Empty: the stream ends.

        A call implies that the batch before has been written.
        """
        if not self._queued:
            self._flushed.set()
            if not self._is_closed:
                self._wakeup.clear()
                await self._wakeup.wait()
        batch: list[node_pb2.CallEvent] = []
        num_bytes = 0
        while self._queued and num_bytes < MAX_BATCH_BYTES:
            event, size = self._queued.popleft()
            batch.append(event)
            num_bytes += size
        return batch


def _context_from(message: node_pb2.CallContext) -> CallContext:
    deadline_s = time.monotonic() + message.timeout_s if message.HasField("timeout_s") else None
    return CallContext(tuple(message.metadata.items()), deadline_s)
