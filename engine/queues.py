"""Who comes next: queues in order of rank that anyone may leave from the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from engine.hashing import BlockHash
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
    request never means to walk past them. One whose prefix is cached meanwhile may be short:
    it comes back when the block appears that it was set aside for.

    Those whose prefix another request is receiving follow that one: they are out of the line
    until its hand-off has ended.
    """

    def __init__(self) -> None:
        self._line = RankedQueue()
        self._aside = RankedQueue()
        self._aside_by_hash: dict[BlockHash, dict[RequestId, tuple[Key, Request]]] = {}
        self._awaited_by_id: dict[RequestId, BlockHash] = {}
        self._receiver_by_id: dict[RequestId, RequestId] = {}  # of those that wait for a prefix
        self._followers: dict[RequestId, list[Request]] = {}  # by the request that receives it

    def __len__(self) -> int:
        return len(self._line) + len(self._aside) + len(self._receiver_by_id)

    def __iter__(self) -> Iterator[Request]:
        yield from self._line
        yield from self._aside
        for followers in self._followers.values():
            yield from followers

    @property
    def num_followers(self) -> int:
        """Requests that wait for another's hand-off: no step can take them."""
        return len(self._receiver_by_id)

    def push(self, request: Request, *, is_resumed: bool = False) -> None:
        self._line.push(_waiting_key(request, is_resumed), request)

    def head(self, *, allow_long: bool = True) -> Request | None:
        first = self._line.peek()
        long = self._aside.peek() if allow_long else None
        if first is None or (long is not None and long[0] < first[0]):
            first = long
        return None if first is None else first[1]

    def step_aside(self, request: Request, until: BlockHash | None = None) -> None:
        """This long prompt, the head, is not the head again while `allow_long` is off.

        Unless the block `until` is cached before: see `bring_back`.
        """
        first = self._line.peek()
        if first is None or first[1] is not request:
            return
        self._line.remove(request)
        self._aside.push(first[0], request)
        if until is not None:
            self._aside_by_hash.setdefault(until, {})[request.request_id] = first[0], request
            self._awaited_by_id[request.request_id] = until

    def bring_back(self, block_hashes: Iterable[BlockHash]) -> None:
        """These blocks are cached now: prompts set aside until then stand where they stood."""
        if not self._aside_by_hash:
            return
        for block_hash in block_hashes:
            for key, request in list(self._aside_by_hash.get(block_hash, {}).values()):
                self.remove(request)
                self._line.push(key, request)

    def follow(self, request: Request, receiver_id: RequestId) -> None:
        """Keep it out of the line until the hand-off of another request has ended."""
        self.remove(request)
        self._receiver_by_id[request.request_id] = receiver_id
        self._followers.setdefault(receiver_id, []).append(request)

    def release_followers(self, receiver_id: RequestId) -> None:
        """Put those that wait for this hand-off back in line, each in its old place."""
        for request in self._followers.pop(receiver_id, ()):
            del self._receiver_by_id[request.request_id]
            self.push(request)

    def remove(self, request: Request) -> None:
        receiver_id = self._receiver_by_id.pop(request.request_id, None)
        if receiver_id is not None:
            self._followers[receiver_id].remove(request)
            return
        if request not in self._aside:
            self._line.remove(request)
            return
        self._aside.remove(request)
        awaited = self._awaited_by_id.pop(request.request_id, None)
        if awaited is not None:
            del self._aside_by_hash[awaited][request.request_id]
            if not self._aside_by_hash[awaited]:
                del self._aside_by_hash[awaited]


def _waiting_key(request: Request, is_resumed: bool) -> Key:
    priority, arrival, serial = request.rank
    return (priority, not is_resumed, arrival, serial)
