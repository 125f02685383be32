"""Streams behind the Generate calls of a gateway: merged for `n` answers, and aborted by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.rpc.errors import RequestIdInUse

Item = TypeVar("Item")


class _Signal(Enum):
    ENDED = auto()  # one stream
    ABORTED = auto()  # the request


class _Call(Generic[Item]):
    """The streams of one request, each read by a task of its own."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[int, Item | _Signal] | Exception] = asyncio.Queue()
        self.may_send = asyncio.Semaphore(1)  # streams that are faster than the caller wait
        self.tasks: list[asyncio.Task[None]] = []

    async def forward(self, index: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await self.may_send.acquire()
                    self.received.put_nowait((index, item))
        except Exception as failure:  # noqa: BLE001 - raised again by the reader
            self.received.put_nowait(failure)
        else:
            self.received.put_nowait((index, _Signal.ENDED))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


class CallStreams(Generic[Item]):
    def __init__(self, is_last: Callable[[Item], bool]) -> None:
        """`is_last` returns whether an item is the last one of its stream."""
        self._is_last = is_last
        self._calls: dict[tuple[str, str], _Call[Item]] = {}  # by owner and id

    def abort(self, request_id: str, owner: str = "") -> bool:
        """End a request of this owner in any state. Returns False if there is none."""
        call = self._calls.get((owner, request_id))
        if call is None:
            return False
        call.received.put_nowait((0, _Signal.ABORTED))
        call.cancel()
        return True

    async def merge(
        self, request_id: str, streams: Sequence[AsyncGenerator[Item, None]], owner: str = ""
    ) -> AsyncGenerator[tuple[int, Item], None]:
        """Yield the items of all streams, each with its stream's index, up to their last ones.

        Ends early if the request is aborted. If a stream fails, or the generator is closed early,
        all streams are cancelled. After its last item, a stream continues until it ends or the
        request is aborted: it may still have to send KV.

        Raises RequestIdInUse, and the errors of the streams.
        """
        key = owner, request_id
        if key in self._calls:
            raise RequestIdInUse(f"request {request_id!r} is under way; choose another id")
        call: _Call[Item] = _Call()
        self._calls[key] = call
        call.tasks = [
            asyncio.ensure_future(call.forward(index, stream))
            for index, stream in enumerate(streams)
        ]
        ending = asyncio.gather(*call.tasks, return_exceptions=True)
        ending.add_done_callback(lambda _: self._calls.pop(key))
        open_streams = set(range(len(streams)))
        try:
            while open_streams:
                received = await call.received.get()
                if isinstance(received, Exception):
                    raise received
                index, item = received
                if item is _Signal.ABORTED:
                    break
                if not isinstance(item, _Signal):
                    yield index, item
                    call.may_send.release()
                if isinstance(item, _Signal) or self._is_last(item):
                    open_streams.discard(index)
        finally:
            if open_streams:
                call.cancel()
                await asyncio.shield(ending)
