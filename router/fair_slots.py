"""Slots for work that takes much time or memory: few at once, and clients take turns."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from baton.core.fair_queue import FairQueue
from baton.rpc.errors import QueueFull

HOST_MARK = "@"  # begins the names of clients without a token
CLIENT_SHARE = 2  # a client with a token has at most this part of the places in the queue
RETRY_AFTER_S = 1.0


def turn_name(owner: str, address: str) -> str:
    """Return the name by which a client takes turns: its token's digest, else that of its host."""
    return owner or (f"{HOST_MARK}{address}" if address else "")


def has_token(client: str) -> bool:
    """Return whether limits per client apply: a host without a token can be many clients' proxy."""
    return bool(client) and not client.startswith(HOST_MARK)


class _Turn(NamedTuple):
    client: str
    came: asyncio.Future[None]


class FairSlots:
    """Slots of clients, by names of `turn_name`."""

    def __init__(
        self, num_slots: int, max_waiting: int, *, max_per_client: int | None = None, what: str
    ) -> None:
        """`max_per_client` is for those with a token; `what` is read, for errors."""
        self._num_free = num_slots
        self._max_per_client = max_per_client or num_slots
        self._what = what
        self._max_waiting = max_waiting
        self._running: Counter[str] = Counter()
        self._waiting = FairQueue[str, _Turn]()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for a slot, and hold it until the block ends. Raises QueueFull."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release(client)

    async def acquire(self, client: str) -> None:
        """Wait for a slot, until `release`. Raises QueueFull."""
        if self._may_run(client):
            self._begin(client)
            return
        self._check_queue(client)
        turn = _Turn(client, asyncio.get_running_loop().create_future())
        self._waiting.add(client, turn)
        try:
            await turn.came
        except asyncio.CancelledError:
            if turn.came.done() and not turn.came.cancelled():
                self.release(client)
            else:
                self._waiting.discard(client, turn)
            raise

    def release(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        while (turn := self._next(client)) is not None:
            if not turn.came.done():  # else its request was cancelled, and has not run since
                self._begin(turn.client)
                turn.came.set_result(None)
                return

    def _next(self, last: str) -> _Turn | None:
        """Take the next turn: of another client than the last one, if others wait."""
        other = self._waiting.take(lambda client: client != last and self._may_run(client))
        return other or self._waiting.take(self._may_run)

    def _may_run(self, client: str) -> bool:
        is_at_limit = has_token(client) and self._running[client] >= self._max_per_client
        return self._num_free > 0 and not is_at_limit

    def _begin(self, client: str) -> None:
        self._running[client] += 1
        self._num_free -= 1

    def _check_queue(self, client: str) -> None:
        waiting = self.num_waiting
        own = self._waiting.num_of(client)
        is_over = has_token(client) and own >= self._max_waiting // CLIENT_SHARE
        if waiting >= self._max_waiting or is_over:
            raise QueueFull(
                f"{waiting} {self._what} already wait to be read; send this one later",
                RETRY_AFTER_S,
            )
