"""Slots for work that takes much time or memory: few at once, and clients take turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.rpc.errors import QueueFull

CLIENT_SHARE = 2  # a client with a token has at most this part of slots and of places in the queue
RETRY_AFTER_S = 1.0


class FairSlots:
    """Slots of clients; an empty name is that of all clients without a token."""

    def __init__(self, num_slots: int, max_waiting: int) -> None:
        self._num_free = num_slots
        self._max_per_client = max(1, num_slots // CLIENT_SHARE)
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        # The next turn first.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the block ends. Raises QueueFull."""
        await self._acquire(client)
        try:
            yield
        finally:
            self._release(client)

    async def _acquire(self, client: str) -> None:
        if self._may_run(client):
            self._begin(client)
            return
        self._check_queue(client)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(client)
            else:
                self._remove(client, turn)
            raise

    def _release(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        following = next(filter(self._may_run, self._waiting), None)
        if following is not None:
            turn = self._waiting[following][0]
            self._waiting.move_to_end(following)
            self._remove(following, turn)
            self._begin(following)
            turn.set_result(None)

    def _may_run(self, client: str) -> bool:
        is_at_limit = bool(client) and self._running[client] >= self._max_per_client
        return self._num_free > 0 and not is_at_limit

    def _begin(self, client: str) -> None:
        self._running[client] += 1
        self._num_free -= 1

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[client]
        turns.remove(turn)
        if not turns:
            del self._waiting[client]

    def _check_queue(self, client: str) -> None:
        waiting = self.num_waiting
        own = len(self._waiting.get(client, ()))
        if waiting >= self._max_waiting or (client and own >= self._max_waiting // CLIENT_SHARE):
            raise QueueFull(
                f"the files of {waiting} requests already wait to be read; send this one later",
                RETRY_AFTER_S,
            )
