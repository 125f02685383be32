"""Tokenises large texts on a few threads, and small ones in turns, so that no turn is long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from baton.core.fair_queue import FairQueue
from baton.router.fair_slots import FairSlots

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LargeTextConfig:
    small_size: int = 2048  # characters or tokens that are faster to process without a thread
    num_threads: int = 2
    max_waiting: int = 64  # limited because each holds its text in memory


class LargeTexts:
    def __init__(self, config: LargeTextConfig = LargeTextConfig()) -> None:
        self._config = config
        self._turns = LoopTurns(config.small_size)
        self._threads = FairSlots(config.num_threads, config.max_waiting, what="large texts")

    async def run(self, size: int, work: Callable[[], Result], client: str = "") -> Result:
        """Run `work`, on a thread if `size` is large. Raises QueueFull if too many wait.

        Clients take turns; `client` is empty without authentication.
        """
        if size <= self._config.small_size:
            return await self.run_in_turn(size, work, client)
        await self._threads.acquire(client)
        result = asyncio.get_running_loop().run_in_executor(None, work)
        result.add_done_callback(partial(self._release_thread, client))
        # A cancelled request ends at once, but its thread is busy until `work` returns.
        return await asyncio.shield(result)

    async def run_in_turn(self, size: int, work: Callable[[], Result], client: str) -> Result:
        """Run `work`, whose time is limited, in a turn of the event loop that has room for it."""
        await self._turns.enter(size, client)
        return work()

    def _release_thread(self, client: str, result: asyncio.Future[Result]) -> None:
        self._threads.release(client)
        if not result.cancelled():
            result.exception()  # mark as retrieved, in case the request was cancelled


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
