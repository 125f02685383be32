"""Queue between threads that takes turns between clients, so that none delays the others."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of a client are in order; clients with items take turns."""

    def __init__(self) -> None:
        self._by_client: OrderedDict[str, deque[Item]] = OrderedDict()  # the next turn first
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, client: str, item: Item) -> None:
        with self._changed:
            self._by_client.setdefault(client, deque()).append(item)
            self._changed.notify()

    def get(self) -> Item | None:
        """Wait for an item and remove it. Returns None once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._by_client or self._is_closed)
            if self._is_closed:
                return None
            client, items = next(iter(self._by_client.items()))
            item = items.popleft()
            if items:
                self._by_client.move_to_end(client)
            else:
                del self._by_client[client]
            return item

    def close(self) -> None:
        """Drop the items, and let all threads that wait return."""
        with self._changed:
            self._by_client.clear()
            self._is_closed = True
            self._changed.notify_all()
