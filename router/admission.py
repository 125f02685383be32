"""Lets requests wait for their turn: the line's clock and its alarm bells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.line import Line, LineConfig


class Admission:
    def __init__(self, config: LineConfig, clock: Callable[[], float]) -> None:
        self._line: Line[asyncio.Event] = Line(config)
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._line.num_in_flight

    def resize(self, num_run_at_once: int) -> None:
        """The nodes run so many requests at once now."""
        for turn in self._line.resize(num_run_at_once):
            turn.set()

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """From when it may go ahead to the end of the block. Raises QueueFull.

        Cancelled while it waits, as by a client that left or a deadline that passed, it
        leaves the line at once.
        """
        turn = asyncio.Event()
        is_admitted = self._line.join(turn, priority)
        try:
            if not is_admitted:
                await turn.wait()
            yield
        finally:
            following = self._line.leave(turn, self._clock())
            if following is not None:
                following.set()
