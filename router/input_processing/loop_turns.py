"""Turns of the event loop: each has room for some small works, and others wait for later ones."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from baton.core.fair_queue import FairQueue


class _Work(NamedTuple):
    size: int
    came: asyncio.Future[None]


class LoopTurns:
    """Limits the size of the works that run in one turn of the event loop. Clients take turns."""

    def __init__(self, max_size: int) -> None:
        """A turn has room for one more work while those in it are smaller than `max_size`."""
        self._max_size = max_size
        self._num_left = max_size
        self._waiting = FairQueue[str, _Work]()
        self._loop: asyncio.AbstractEventLoop | None = None  # that will call `_begin_turn`

    async def enter(self, size: int, client: str) -> None:
        """Return in a turn that has room for a work of this size, which must begin at once."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._begin_turn)
        if self._num_left > 0:
            self._num_left -= size
            return
        work = _Work(size, loop.create_future())
        self._waiting.add(client, work)
        await work.came

    def _begin_turn(self) -> None:
        is_idle = self._num_left == self._max_size
        self._num_left = self._max_size
        while self._num_left > 0 and (work := self._waiting.take()) is not None:
            if not work.came.done():  # else it was cancelled
                self._num_left -= work.size
                work.came.set_result(None)
        if is_idle or self._loop is None:
            self._loop = None
        else:
            self._loop.call_soon(self._begin_turn)
