"""A node's end of the streams that routers open: many calls side by side on each.

What all calls of a stream have to tell at one moment, such as after a step of the engine, goes
out as one message: a message costs far more than what is in it (ADR 0023).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass
from typing import Any

from google.rpc import code_pb2, status_pb2

from baton.v1 import node_pb2
from serving.errors import DeadlineExceeded, Draining, MessageTooLarge, UnsupportedInput
from serving.sizes import MAX_BATCH_BYTES, MAX_EVENT_BYTES
from serving.status import NAMED, TOO_LARGE, TOO_LARGE_ADVICE, status_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallContext:
    """What gRPC would tell of a call of its own."""

    metadata: tuple[tuple[str, str], ...] = ()
    deadline_s: float | None = None  # on the monotonic clock

    def time_remaining(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()


Order = node_pb2.PrefillOrder | node_pb2.DecodeOrder
Request = node_pb2.PrefillRequest | node_pb2.DecodeRequest
# Takes the order of a `start`: a PrefillOrder or a DecodeOrder.
Serve = Callable[[Any, CallContext], AsyncGenerator[node_pb2.CallEvent, None]]
# Counts a call, or refuses it, for whoever has to wait for its end.
Count = Callable[[], AbstractContextManager[None]]


async def serve_calls(
    requests: AsyncIterator[Request], serve: Serve, count: Count, **metadata: str
) -> AsyncGenerator[list[node_pb2.CallEvent], None]:
    """What the stream has to tell, bit by bit, until its last call has ended.

    `metadata` is told with each call that fails. Left early, every call is cancelled.
    """
    calls = _Calls(serve, count, metadata)
    reading = asyncio.ensure_future(calls.read(requests))
    try:
        while batch := await calls.outbox.next_batch():
            yield batch
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await calls.cancel_all()


class _Calls:
    """The calls of one stream; each is a task."""

    def __init__(self, serve: Serve, count: Count, metadata: dict[str, str]) -> None:
        self._serve = serve
        self._count = count
        self._metadata = metadata
        self._task_by_call: dict[int, asyncio.Task[None]] = {}
        self._is_read = False
        self.outbox = _Outbox()

    async def read(self, requests: AsyncIterator[Request]) -> None:
        """Does what the router orders, until it has no more to say."""
        try:
            async for request in requests:
                self._obey(request)
        except UnsupportedInput:
            self.outbox.close()  # the stream cannot be trusted any more
            raise
        finally:
            self._is_read = True
            self._close_when_idle()

    async def cancel_all(self) -> None:
        tasks = list(self._task_by_call.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _obey(self, request: Request) -> None:
        kind = request.WhichOneof("order")
        if kind is None:
            raise UnsupportedInput(f"call {request.call}: neither `start` nor `cancel` is set")
        task = self._task_by_call.get(request.call)
        if kind == "start" and task is not None:
            raise UnsupportedInput(f"call {request.call} is under way; count on for each new one")
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
            with self._count():
                self._end(call, await self._served(call, order))
                # Whoever waits for the last call may close the server then.
                await self.outbox.flushed()
        except Draining as refusal:
            self._end(call, status_of(refusal, self._metadata))

    async def _served(self, call: int, order: Order) -> status_pb2.Status | None:
        """How it failed, if it did."""
        try:
            await self._tell(call, order)
        except NAMED as error:
            return status_of(error, self._metadata)
        except Exception as bug:
            log.exception("a call ended on a bug")
            return status_pb2.Status(code=code_pb2.UNKNOWN, message=f"{type(bug).__name__}: {bug}")
        return None

    async def _tell(self, call: int, order: Order) -> None:
        context = _context_from(order.context)
        timer = asyncio.timeout_at(context.deadline_s)
        try:
            async with timer, aclosing(self._serve(order, context)) as events:
                async for event in events:
                    event.call = call
                    self.outbox.put(event)
        except TimeoutError:
            if not timer.expired():
                raise
            raise DeadlineExceeded("the deadline passed before the call had ended") from None

    def _end(self, call: int, status: status_pb2.Status | None) -> None:
        told = b"" if status is None else status.SerializeToString()
        self.outbox.put(node_pb2.CallEvent(call=call, end=node_pb2.CallEnd(status=told)))


class _Outbox:
    """Events on their way to the router.

    It holds no more than the answers of the calls under way, however slow the router reads.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[node_pb2.CallEvent, int]] = deque()  # with their sizes
        self._came = asyncio.Event()
        self._flushed = asyncio.Event()
        self._is_closed = False

    def put(self, event: node_pb2.CallEvent) -> None:
        """Raises MessageTooLarge: sent, it would break the stream for all its calls."""
        num_bytes = event.ByteSize()
        if num_bytes > MAX_EVENT_BYTES:
            raise MessageTooLarge(
                f"{TOO_LARGE} ({num_bytes} vs. {MAX_EVENT_BYTES}); {TOO_LARGE_ADVICE}"
            )
        self._waiting.append((event, num_bytes))
        self._came.set()
        self._flushed.clear()

    def close(self) -> None:
        """Once all is told, no more comes."""
        self._is_closed = True
        self._came.set()

    async def flushed(self) -> None:
        """Returns when everything that was put has been written."""
        await self._flushed.wait()

    async def next_batch(self) -> list[node_pb2.CallEvent]:
        """All that waits, as far as a message may hold it. Empty: there is no more.

        Asking for the next one tells that the one before is written.
        """
        if not self._waiting:
            self._flushed.set()
            if not self._is_closed:
                self._came.clear()
                await self._came.wait()
        batch: list[node_pb2.CallEvent] = []
        num_bytes = 0
        while self._waiting and num_bytes < MAX_BATCH_BYTES:
            event, size = self._waiting.popleft()
            batch.append(event)
            num_bytes += size
        return batch


def _context_from(message: node_pb2.CallContext) -> CallContext:
    deadline_s = time.monotonic() + message.timeout_s if message.HasField("timeout_s") else None
    return CallContext(tuple(message.metadata.items()), deadline_s)
