"""Who comes next: queues in order of rank that anyone may leave from the middle."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from engine.lifecycle import Request
from engine.request import RequestId

Key = tuple[float, ...]


class RankedQueue:
    """The lowest key first. Push and pop O(log n); leaving O(1), swept up later."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._serial_by_id: dict[RequestId, int] = {}  # of those still in the queue
        self._next_serial = 0

    def __len__(self) -> int:
        return len(self._serial_by_id)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._serial_by_id

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return (entry[2] for entry in self._heap if self._is_live(entry))

    def push(self, key: Key, request: Request) -> None:
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
        if len(self._heap) > 2 * len(self._serial_by_id) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        return self._serial_by_id.get(entry[2].request_id) == entry[1]


class WaitingLine:
    """Those that hold nothing. Resumed ones stand in front of new ones of their priority.

    Long prompts that must wait for other long ones step aside, so that finding the next
    request never means to walk past them.
    """

    def __init__(self) -> None:
        self._line = RankedQueue()
        self._aside = RankedQueue()

    def __len__(self) -> int:
        return len(self._line) + len(self._aside)

    def __iter__(self) -> Iterator[Request]:
        yield from self._line
        yield from self._aside

    def push(self, request: Request, *, is_resumed: bool = False) -> None:
        self._line.push(_waiting_key(request, is_resumed), request)

    def head(self, *, allow_long: bool = True) -> Request | None:
        first = self._line.peek()
        long = self._aside.peek() if allow_long else None
        if first is None or (long is not None and long[0] < first[0]):
            first = long
        return None if first is None else first[1]

    def step_aside(self, request: Request) -> None:
        """This long prompt, the head, is not the head again while `allow_long` is off."""
        first = self._line.peek()
        if first is None or first[1] is not request:
            return
        self._line.remove(request)
        self._aside.push(first[0], request)

    def remove(self, request: Request) -> None:
        (self._aside if request in self._aside else self._line).remove(request)


def _waiting_key(request: Request, is_resumed: bool) -> Key:
    priority, arrival, serial = request.rank
    return (priority, not is_resumed, arrival, serial)
