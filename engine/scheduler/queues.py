"""Waiting queue: who is tried next, and who waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace

from baton.core.ids import RequestId
from baton.engine.kv_arrival.fills import FillId
from baton.engine.scheduler.request import Request

Key = tuple[float, ...]


class WaitingQueue:
    """Waiting queue: requests that hold no blocks, resumed ones first within a priority.

    Requests that lack a grant come last, whatever their priority: the others' blocks on decode
    nodes are of no use to anyone until their KV is there.

    Long prompts that must wait for other long ones are set aside, so that finding the next
    request never iterates over them.

    A request that waits for a fill follows it: it is out of the queue until the fill has ended, or
    its own time for this is over. One that waits for a place of its adapter is out of it, too.
    """

    def __init__(self, num_held: Callable[[str], int] = lambda _: 0) -> None:
        """`num_held` returns how many blocks a client holds."""
        self._queue = ClientQueue(num_held)
        self._aside_queue = ClientQueue(num_held)
        self._fill_by_id: dict[RequestId, FillId] = {}  # of followers
        self._followers: dict[FillId, list[Request]] = {}
        self._followers_by_deadline = RankedQueue()
        self._place_queue = RankedQueue()
        self._place_queue_by_adapter: defaultdict[str, RankedQueue] = defaultdict(RankedQueue)

    def __len__(self) -> int:
        return len(self._queue) + len(self._aside_queue) + self.num_out

    def __iter__(self) -> Iterator[Request]:
        yield from self._queue
        yield from self._aside_queue
        yield from self._place_queue
        yield from self.followers()

    def followers(self) -> Iterator[Request]:
        """Iterate over the requests that wait for a fill."""
        for followers in self._followers.values():
            yield from followers

    @property
    def num_out(self) -> int:
        """Number of requests that wait for a fill or an adapter, which no step can schedule."""
        return len(self._fill_by_id) + len(self._place_queue)

    def push(self, request: Request) -> None:
        self._queue.push(waiting_key(request), request)

    def head(self, *, allow_long: bool = True) -> Request | None:
        # Both heaps have the same keys, so that a long prompt regains its place.
        first = self._queue.peek()
        long = self._aside_queue.peek() if allow_long else None
        if first is None or (long is not None and long[0] < first[0]):
            first = long
        return None if first is None else first[1]

    def first_aside(self) -> Request | None:
        """Return the first of the long prompts that were set aside."""
        first = self._aside_queue.peek()
        return None if first is None else first[1]

    def note_release(self, client: str) -> None:
        """Let a client come earlier that holds fewer blocks than before."""
        self._queue.note_release(client)
        self._aside_queue.note_release(client)

    def note_grant(self, request: Request) -> None:
        """Move a request to the place that its grant gives it, if it is in the queue."""
        if request in self._queue or request in self._aside_queue:
            self._requeue(request)

    def set_aside(self, request: Request) -> None:
        """Set the head, a long prompt, aside: `head` skips it while `allow_long` is off."""
        if request in self._queue:
            self._queue.remove(request)
            self._aside_queue.push(waiting_key(request), request)

    def follow(self, request: Request, fill_id: FillId, until_s: float) -> None:
        """Keep a request out of the queue until `release_followers` of the same id, or a time."""
        self.remove(request)
        self._fill_by_id[request.request_id] = fill_id
        self._followers.setdefault(fill_id, []).append(request)
        self._followers_by_deadline.push((until_s,), request)

    def release_followers(self, fill_id: FillId) -> None:
        """Return the followers of this fill to the queue, each in its former place."""
        for request in list(self._followers.get(fill_id, ())):
            self._requeue(request)

    def release_overdue(self, now: float) -> bool:
        """Return the followers whose time is over to the queue. Returns whether there are any."""
        num_before = len(self._fill_by_id)
        while (first := self._followers_by_deadline.peek()) is not None and first[0][0] <= now:
            self._requeue(first[1])
        return len(self._fill_by_id) < num_before

    def await_place(self, request: Request) -> None:
        """Keep a request out of the queue until `release_adapter`."""
        self.remove(request)
        key = waiting_key(request)
        self._place_queue.push(key, request)
        self._place_queue_by_adapter[request.adapter_id].push(key, request)

    def first_for_place(self) -> Request | None:
        """Return the first in rank of those that wait for a place of their adapter."""
        first = self._place_queue.peek()
        return None if first is None else first[1]

    def release_adapter(self, adapter_id: str) -> None:
        """Return those that wait for a place of this adapter to the queue."""
        for request in list(self._place_queue_by_adapter[adapter_id]):
            self._requeue(request)

    def _requeue(self, request: Request) -> None:
        self.remove(request)
        self.push(request)

    def remove(self, request: Request) -> None:
        fill_id = self._fill_by_id.pop(request.request_id, None)
        if fill_id is not None:
            self._followers_by_deadline.remove(request)
            self._followers[fill_id].remove(request)
            if not self._followers[fill_id]:
                del self._followers[fill_id]
        elif request in self._place_queue:
            self._remove_from_place_queue(request)
        elif request in self._aside_queue:
            self._aside_queue.remove(request)
        else:
            self._queue.remove(request)

    def _remove_from_place_queue(self, request: Request) -> None:
        self._place_queue.remove(request)
        same_adapter = self._place_queue_by_adapter[request.adapter_id]
        same_adapter.remove(request)
        if not same_adapter:
            del self._place_queue_by_adapter[request.adapter_id]


def waiting_key(request: Request) -> Key:
    priority, arrival, serial = request.rank
    return (request.lacks_grant, priority, not request.is_resumed, arrival, serial)


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
