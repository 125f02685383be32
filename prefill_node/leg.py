"""Last writes of KV, for which the calls of prefill legs wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.core.ids import HandoffId
from baton.core.output import FinishReason

# A leg that ends in another way sends nothing more.
FINISHED_WITH_FIRST_TOKEN = (FinishReason.HANDED_OFF, FinishReason.STOP, FinishReason.LENGTH)


class PrefillLegs:
    """Prefill legs in progress. `withdraw` is called for one that ends before its last write.

    Create it on the asyncio loop.
    """

    def __init__(self, withdraw: Callable[[HandoffId], None]) -> None:
        self._withdraw = withdraw
        self._loop = asyncio.get_running_loop()
        self._last_writes: dict[HandoffId, asyncio.Event] = {}

    @contextmanager
    def sending(self, handoff_id: HandoffId | None) -> Iterator[None]:
        """Expect the KV of a hand-off to be sent before the block ends; None: nothing is sent."""
        if handoff_id is None:
            yield
            return
        last_write = self._last_writes[handoff_id] = asyncio.Event()
        try:
            yield
        finally:
            del self._last_writes[handoff_id]
            if not last_write.is_set():
                self._withdraw(handoff_id)

    async def until_sent(self, handoff_id: HandoffId, reason: FinishReason | None) -> None:
        """Return after the last write of a request that has finished."""
        if reason in FINISHED_WITH_FIRST_TOKEN:
            await self._last_writes[handoff_id].wait()

    def mark_sent(self, handoff_id: HandoffId) -> None:
        """Mark the last write as complete. Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._set, handoff_id)

    def _set(self, handoff_id: HandoffId) -> None:
        last_write = self._last_writes.get(handoff_id)
        if last_write is not None:
            last_write.set()
