"""Queue in which owners, such as tenants or clients, take turns, so that none delays the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Owner = TypeVar("Owner", bound=Hashable)
Item = TypeVar("Item")


def _anyone(_: object) -> bool:
    return True


class FairQueue(Generic[Owner, Item]):
    """The items of an owner are in order; owners with items take turns."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Owner, deque[Item]] = OrderedDict()  # the next turn first

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def num_of(self, owner: Owner) -> int:
        """Return how many items of the owner wait."""
        return len(self._queues.get(owner, ()))

    def add(self, owner: Owner, item: Item) -> None:
        self._queues.setdefault(owner, deque()).append(item)

    def take(self, may_take: Callable[[Owner], bool] = _anyone) -> Item | None:
        """Take the next item of those owners that may have one."""
        owner = self._next(may_take)
        if owner is None:
            return None
        queue = self._queues[owner]
        item = queue.popleft()
        if queue:
            self._queues.move_to_end(owner)
        else:
            del self._queues[owner]
        return item

    def discard(self, owner: Owner, item: Item) -> None:
        """Remove an item, if it is there. It need not be the first one of its owner."""
        queue = self._queues.get(owner)
        if queue is None or item not in queue:
            return
        queue.remove(item)
        if not queue:
            del self._queues[owner]

    def has_any(self, may_take: Callable[[Owner], bool] = _anyone) -> bool:
        return self._next(may_take) is not None

    def clear(self) -> None:
        self._queues.clear()

    def _next(self, may_take: Callable[[Owner], bool]) -> Owner | None:
        return next(filter(may_take, self._queues), None)
