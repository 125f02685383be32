"""Tokenises large texts on a few threads, so that the event loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from baton.router.fair_slots import FairSlots
from baton.router.input_processing.loop_turns import LoopTurns

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
