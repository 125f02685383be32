"""Priority queue of requests, with cheap removal from any position."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from baton.core.ids import RequestId
from baton.engine.scheduler.request import Request

Key = tuple[float, ...]


class RankedQueue:
    """Min-heap of requests by key. Push O(log n), remove O(1) amortised by lazy deletion."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._serial_by_id: dict[RequestId, int] = {}  # of the queued requests
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serial_by_id)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._serial_by_id

    def __iter__(self) -> Iterator[Request]:
        """Iterate in no particular order."""
        return (entry[2] for entry in self._heap if self._is_live(entry))

    def push(self, key: Key, request: Request) -> None:
        # The serial keeps requests with equal keys in order of arrival, and is compared before the
        # request, which has no order. A request that is pushed again gets another one, so that its
        # old entry is dead.
        self._next_serial += 1
        self._serial_by_id[request.request_id] = self._next_serial
        heappush(self._heap, (key, self._next_serial, request))

    def peek(self) -> tuple[Key, Request] | None:
        while self._heap:
            entry = self._heap[0]
            if self._is_live(entry):
                return entry[0], entry[2]
            heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        del self._serial_by_id[request.request_id]
        # The entry stays until it comes to the top. If most are dead, as after many aborts, the
        # heap is rebuilt: memory stays proportional to the queued requests.
        if len(self._heap) > 2 * len(self._serial_by_id) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        return self._serial_by_id.get(entry[2].request_id) == entry[1]
