"""Asynchronous front of the admission queue: requests await their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from router.admission.admission_queue import AdmissionQueue, AdmissionQueueConfig


class AdmissionGate:
    def __init__(self, config: AdmissionQueueConfig, clock: Callable[[], float]) -> None:
        self._line: AdmissionQueue[asyncio.Event] = AdmissionQueue(config)
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._line.num_in_flight

    def resize(self, num_batch_slots: int) -> None:
        """Set how many requests the nodes run at once, and admit more if there is room."""
        for turn in self._line.resize(num_batch_slots):
            turn.set()

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """Wait for admission, and hold the place until the end of the block. Raises QueueFull.

        A request that is cancelled while it waits, such as by a disconnected client or a deadline,
        leaves the queue at once.
        """
        turn = asyncio.Event()
        is_admitted = self._line.join(turn, priority)
        try:
            if not is_admitted:
                await turn.wait()
            yield
        finally:
            admitted = self._line.leave(turn, self._clock())
            if admitted is not None:
                admitted.set()
