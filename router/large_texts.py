"""Large texts are read on threads, a few at once: the loop that streams tokens never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from engine.errors import InvalidConfig
from serving.errors import QueueFull

RETRY_AFTER_S = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LargeTextConfig:
    small_size: int = 2048  # characters or tokens; up to here it takes less than a thread would
    num_threads: int = 2
    max_waiting: int = 64  # each holds its text in memory

    def __post_init__(self) -> None:
        if self.num_threads < 1:
            raise InvalidConfig(f"num_threads is {self.num_threads}; it must be at least 1")


class LargeTexts:
    def __init__(self, config: LargeTextConfig = LargeTextConfig()) -> None:
        self._config = config
        self._threads = asyncio.Semaphore(config.num_threads)
        self._num_waiting = 0

    async def read(self, size: int, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises. Raises QueueFull when too many wait already."""
        if size <= self._config.small_size:
            return work()
        await self._turn()
        ended = asyncio.get_running_loop().run_in_executor(None, work)
        ended.add_done_callback(self._ended)
        # Who is cancelled goes at once; the thread is free when it is, and not before.
        return await asyncio.shield(ended)

    async def _turn(self) -> None:
        if self._num_waiting >= self._config.max_waiting:
            raise QueueFull(
                f"{self._num_waiting} large texts wait already to be read; send this one later",
                RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            await self._threads.acquire()
        finally:
            self._num_waiting -= 1

    def _ended(self, ended: asyncio.Future[Result]) -> None:
        self._threads.release()
        if not ended.cancelled():
            ended.exception()  # seen, should nobody wait for it any more
