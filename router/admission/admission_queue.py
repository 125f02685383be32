"""Priority admission queue: admits, queues or rejects requests, by forecasts of waits. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Generic, NamedTuple, TypeVar

from baton.core.options import ROUTING, Option, check_options
from baton.rpc.errors import QueueFull

# Weight of the newest interval between two ends in the moving average.
NEWEST_WEIGHT = 0.1
INITIAL_INTERVAL_S = 1.0
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 60.0
INITIAL_CAPACITY = 1024  # until a decode node has reported how many it runs

K = TypeVar("K", bound=Hashable)
# First tokens arrive in bunches, one per step: a rate needs many of them.
WINDOW_SIZE = 64
# Weight of the newest answer in the moving averages.

MIN_MEASURED_TOKENS = 2  # that an answer needs for its pace to count


class FirstTokenForecast:
    """Counts the requests without a first token, and the rate at which first tokens arrive."""

    def __init__(self) -> None:
        self._num_by_priority: Counter[int] = Counter()
        # Times of the latest first tokens, on a clock that stops while no request waits.
        self._marks_s: deque[float] = deque([0.0], maxlen=WINDOW_SIZE + 1)
        self._awaited_s = 0.0  # reading of that clock
        self._since_s = 0.0  # time of that reading

    def note_arrival(self, priority: int, now: float) -> None:
        if not self._num_by_priority:
            self._since_s = now
        self._num_by_priority[priority] += 1

    def note_first_token(self, priority: int, now: float) -> None:
        self._awaited_s += now - self._since_s
        self._since_s = now
        self._marks_s.append(self._awaited_s)
        self.note_left(priority)

    def note_left(self, priority: int) -> None:
        self._num_by_priority[priority] -= 1
        if not self._num_by_priority[priority]:
            del self._num_by_priority[priority]

    def wait_s(self, priority: int) -> float:
        """Estimate the wait; 0 if no request is ahead, so that the current rate can be measured."""
        ahead = sum(num for other, num in self._num_by_priority.items() if other <= priority)
        return (ahead + 1) * self._interval_s if ahead else 0.0

    @property
    def _interval_s(self) -> float:
        num = len(self._marks_s) - 1
        return (self._marks_s[-1] - self._marks_s[0]) / num if num else 0.0


class AnswerForecast:
    def __init__(self) -> None:
        # Seconds per token, with the wait for the first one spread over all.
        self._token_s: float | None = None
        self._num_tokens: float | None = None  # of a complete answer
        self._num_concurrent = 0.0  # requests in flight during an answer

    def note_answer(
        self, num_tokens: int, duration_s: float, num_under_way: int, *, is_whole: bool
    ) -> None:
        """Record an answer. `num_under_way` includes it.

        The pace of incomplete answers counts too: otherwise nothing would be learnt while all
        requests exceed their deadlines.
        """
        if num_tokens >= MIN_MEASURED_TOKENS:
            token_s = duration_s / num_tokens
            is_first = not self._token_s
            self._num_concurrent = _average(self._num_concurrent, num_under_way, is_first=is_first)
            self._token_s = _average(self._token_s or 0.0, token_s, is_first=is_first)
        before = self._num_tokens or 0.0
        if is_whole or num_tokens > before:
            self._num_tokens = _average(before, num_tokens, is_first=not before)

    def duration_s(self, max_tokens: int | None, num_under_way: int) -> float:
        """Estimate the duration of an answer next to `num_under_way` others; 0 without others.

        With less concurrency than measured, the estimate is proportionally lower: the best case.
        With more, it stays the same until that has been measured.
        """
        if not num_under_way or self._token_s is None or self._num_tokens is None:
            return 0.0
        num_tokens = min(self._num_tokens, max_tokens or self._num_tokens)
        share = min(1.0, (num_under_way + 1) / max(1.0, self._num_concurrent))
        return num_tokens * self._token_s * share


def _average(before: float, newest: float, *, is_first: bool) -> float:
    return newest if is_first else before + NEWEST_WEIGHT * (newest - before)


@dataclass(frozen=True, slots=True)
class AdmissionQueueConfig:
    # With more than the decode nodes run at once, some would queue on the nodes, which do not order
    # them by priority or reject any.
    max_in_flight: Annotated[
        int | None,
        Option(
            "Maximum number of requests in flight on the nodes of a model. Default: as many as the "
            "decode nodes' batches hold.",
            ROUTING,
            at_least=1,
            is_setting=True,
        ),
    ] = None
    max_queue: Annotated[
        int,
        Option(
            "Maximum number of queued requests for a model; more are refused (QUEUE_FULL).",
            ROUTING,
            at_least=0,
            is_setting=True,
        ),
    ] = 1024

    def __post_init__(self) -> None:
        check_options(self)


class _Waiting(NamedTuple, Generic[K]):
    priority: int
    number: int  # of arrivals
    key: K
    client: str


class AdmissionQueue(Generic[K]):
    """Queue of keys. Each key joins once and leaves once, whether it waits or is in flight.

    Within a priority, the client with the fewest keys in flight comes first, then the order of
    arrival: with one client, that alone.
    """

    def __init__(self, config: AdmissionQueueConfig) -> None:
        self._config = config
        self._client_by_key: dict[K, str] = {}  # in flight
        self._num_in_flight: Counter[str] = Counter()  # by client
        self._waiting: dict[K, _Waiting[K]] = {}
        self._heaps: dict[str, list[_Waiting[K]]] = {}  # those that wait, by client
        self._numbers = itertools.count()
        self._last_end_s: float | None = None
        self._interval_s = INITIAL_INTERVAL_S
        self._capacity = config.max_in_flight or INITIAL_CAPACITY

    def resize(self, num_batch_slots: int) -> list[K]:
        """Set the capacity of the nodes and return the keys admitted by it. 0: not known yet."""
        if self._config.max_in_flight is None and num_batch_slots:
            self._capacity = num_batch_slots
        return list(iter(self._admit_next, None))

    @property
    def num_in_flight(self) -> int:
        return len(self._client_by_key)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def join(self, key: K, priority: int, client: str = "") -> bool:
        """Return whether the key is admitted at once. Raises QueueFull."""
        if self.num_in_flight < self._capacity:
            self._admit(key, client)
            return True
        if self.num_waiting >= self._config.max_queue:
            raise self._refusal()
        waiting = _Waiting(priority, next(self._numbers), key, client)
        self._waiting[key] = waiting
        heapq.heappush(self._heaps.setdefault(client, []), waiting)
        return False

    def leave(self, key: K, now: float) -> K | None:
        """Remove the key and return the one admitted instead, if any."""
        if key in self._client_by_key:
            client = self._client_by_key.pop(key)
            self._num_in_flight[client] -= 1
            if not self._num_in_flight[client]:
                del self._num_in_flight[client]
            self._note_end(now)
            return self._admit_next()
        waiting = self._waiting.pop(key)
        heap = self._heaps[waiting.client]
        heap.remove(waiting)
        heapq.heapify(heap)
        if not heap:
            del self._heaps[waiting.client]
        return None

    def retry_after_s(self) -> float:
        """Estimate when the queue will have room: it moves up by one at every end."""
        wait_s = self._interval_s * (self.num_waiting + 1)
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _admit_next(self) -> K | None:
        if not self._heaps or self.num_in_flight >= self._capacity:
            return None
        client = min(self._heaps, key=self._turn_of)
        first = heapq.heappop(self._heaps[client])
        if not self._heaps[client]:
            del self._heaps[client]
        del self._waiting[first.key]
        self._admit(first.key, client)
        return first.key

    def _turn_of(self, client: str) -> tuple[int, int, int]:
        first = self._heaps[client][0]
        return first.priority, self._num_in_flight[client], first.number

    def _admit(self, key: K, client: str) -> None:
        self._client_by_key[key] = client
        self._num_in_flight[client] += 1

    def _note_end(self, now: float) -> None:
        if self._last_end_s is not None:
            self._interval_s += NEWEST_WEIGHT * (now - self._last_end_s - self._interval_s)
        self._last_end_s = now

    def _refusal(self) -> QueueFull:
        wait_s = self.retry_after_s()
        counts = f"{self.num_in_flight} requests are under way and {self.num_waiting} wait"
        return QueueFull(f"the queue is full: {counts}; try again in {wait_s:.1f} s", wait_s)
