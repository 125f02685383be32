"""Queue between threads that takes turns between clients, so that none delays the others."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from baton.core.fair_queue import FairQueue

Item = TypeVar("Item")


class BlockingFairQueue(Generic[Item]):
    """Items of a client are in order; clients with items take turns."""

    def __init__(self) -> None:
        self._queue = FairQueue[str, Item]()
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, client: str, item: Item) -> None:
        with self._changed:
            self._queue.add(client, item)
            self._changed.notify()

    def get(self) -> Item | None:
        """Wait for an item and remove it. Returns None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue.has_any() or self._is_closed)
            return None if self._is_closed else self._queue.take()

    def close(self) -> None:
        """Drop the items, and let all threads that wait return."""
        with self._changed:
            self._queue.clear()
            self._is_closed = True
            self._changed.notify_all()
