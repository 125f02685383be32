"""Tokenises large texts on a few threads, so that the event loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from baton.rpc.errors import QueueFull

RETRY_AFTER_S = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LargeTextConfig:
    small_size: int = 2048  # characters or tokens that are faster to process without a thread
    num_threads: int = 2
    max_waiting: int = 64  # limited because each holds its text in memory


class LargeTexts:
    def __init__(self, config: LargeTextConfig = LargeTextConfig()) -> None:
        self._config = config
        self._threads = asyncio.Semaphore(config.num_threads)
        self._num_waiting = 0

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """Run `work`, on a thread if `size` is large. Raises QueueFull if too many wait."""
        if size <= self._config.small_size:
            return work()
        await self._acquire_thread()
        result = asyncio.get_running_loop().run_in_executor(None, work)
        result.add_done_callback(self._release_thread)
        # A cancelled request ends at once, but its thread is busy until `work` returns.
        return await asyncio.shield(result)

    async def _acquire_thread(self) -> None:
        if self._num_waiting >= self._config.max_waiting:
            raise QueueFull(
                f"{self._num_waiting} large texts already wait to be read; send this one later",
                RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            await self._threads.acquire()
        finally:
            self._num_waiting -= 1

    def _release_thread(self, result: asyncio.Future[Result]) -> None:
        self._threads.release()
        if not result.cancelled():
            result.exception()  # mark as retrieved, in case the request was cancelled
