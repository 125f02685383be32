"""Streams behind the Generate calls of a gateway, which it aborts by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import Enum, auto
from typing import Generic, TypeVar

from baton.rpc.errors import RequestIdInUse

Item = TypeVar("Item")


class _End(Enum):
    """End of a stream, or of a task that was cancelled."""

    END = auto()


class AbortableStreams(Generic[Item]):
    """Streams in progress, each read by a task of its own."""

    def __init__(self) -> None:
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}  # by owner and id

    def abort(self, request_id: str, owner: str = "") -> None:
        """End a request of this owner, if there is one."""
        task = self._tasks.get((owner, request_id))
        if task is not None:
            task.cancel()

    async def run(
        self, request_id: str, stream: AsyncGenerator[Item, None], owner: str = ""
    ) -> AsyncGenerator[Item, None]:
        """Yield the items of a stream. Ends early if the request is aborted.

        Closing the generator early closes the stream. Raises RequestIdInUse, and the errors of the
        stream.
        """
        key = owner, request_id
        if key in self._tasks:
            raise RequestIdInUse(f"request {request_id!r} is under way; choose another id")
        received = asyncio.Queue[Item | Exception | _End]()
        may_send = asyncio.Semaphore(1)  # a stream that is faster than the caller waits

        async def forward() -> None:
            try:
                async with aclosing(stream) as items:
                    async for item in items:
                        await may_send.acquire()
                        received.put_nowait(item)
            except Exception as failure:  # noqa: BLE001 - raised again by the reader
                received.put_nowait(failure)

        def note_end(_task: asyncio.Task[None]) -> None:
            del self._tasks[key]
            received.put_nowait(_End.END)

        task = self._tasks[key] = asyncio.ensure_future(forward())
        task.add_done_callback(note_end)
        try:
            while (item := await received.get()) is not _End.END:
                if isinstance(item, Exception):
                    raise item
                yield item
                may_send.release()
        finally:
            task.cancel()
            await asyncio.wait([task])
