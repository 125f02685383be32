"""Queue of requests in which clients have turns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from baton.engine.scheduler.ranked_queue import Key, RankedQueue
from baton.engine.scheduler.request import Request


class ClientQueue:
    """Within a priority, the client that holds the fewest blocks comes first; its requests by key.

    Keys are those of `waiting_key`: requests that lack a grant come after all others.

    The heap has a lower bound of each client's key, which is made exact when it comes to the top:
    most changes of what a client holds cost nothing.
    """

    def __init__(self, num_held: Callable[[str], int]) -> None:
        self._num_held = num_held
        self._queues: dict[str, RankedQueue] = {}
        self._heap: list[tuple[Key, str]] = []
        self._bounds: dict[str, Key] = {}  # of the clients that have requests here
        self._num_requests = 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, request: Request) -> bool:
        return request in self._queues.get(request.client, ())

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        for queue in self._queues.values():
            yield from queue

    def push(self, key: Key, request: Request) -> None:
        self._queues.setdefault(request.client, RankedQueue()).push(key, request)
        self._num_requests += 1
        self.note_release(request.client)

    def note_release(self, client: str) -> None:
        """Let a client come earlier that holds fewer blocks than before."""
        key = self._key(client)
        if key is not None and (client not in self._bounds or key < self._bounds[client]):
            self._bounds[client] = key
            heappush(self._heap, (key, client))
            if len(self._heap) > 2 * len(self._bounds) + 64:
                self._heap = [(bound, each) for each, bound in self._bounds.items()]
                heapify(self._heap)

    def peek(self) -> tuple[Key, Request] | None:
        while self._heap:
            bound, client = self._heap[0]
            key = self._key(client)
            if key is None or self._bounds.get(client) != bound:
                heappop(self._heap)
                continue
            first = self._queues[client].peek()
            if key == bound and first is not None:
                return key, first[1]
            self._bounds[client] = key
            heapreplace(self._heap, (key, client))
        return None

    def remove(self, request: Request) -> None:
        queue = self._queues[request.client]
        queue.remove(request)
        self._num_requests -= 1
        if not queue:
            del self._queues[request.client], self._bounds[request.client]

    def _key(self, client: str) -> Key | None:
        queue = self._queues.get(client)
        first = None if queue is None else queue.peek()
        if first is None:
            return None
        lacks_grant, priority, *others = first[0]
        return (lacks_grant, priority, self._num_held(client), *others)
