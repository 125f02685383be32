"""Waiting queue: who is tried next, and who waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

from baton.core.ids import RequestId
from baton.engine.kv_arrival.fills import FillId
from baton.engine.scheduler.client_queue import ClientQueue
from baton.engine.scheduler.ranked_queue import Key, RankedQueue
from baton.engine.scheduler.request import Request


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
