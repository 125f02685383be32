"""Priority admission queue: admits, queues or rejects requests. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from baton.core.options import ROUTING, Option, check_options
from baton.rpc.errors import QueueFull

# Weight of the newest interval between two ends in the moving average.
NEWEST_WEIGHT = 0.1
INITIAL_INTERVAL_S = 1.0
MIN_RETRY_AFTER_S, MAX_RETRY_AFTER_S = 0.1, 60.0
INITIAL_CAPACITY = 1024  # until a decode node has reported how many it runs

K = TypeVar("K", bound=Hashable)


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
        ),
    ] = None
    max_queue: Annotated[
        int,
        Option(
            "Maximum number of queued requests for a model; more are refused (QUEUE_FULL).",
            ROUTING,
            at_least=0,
        ),
    ] = 1024

    def __post_init__(self) -> None:
        check_options(self)


class AdmissionQueue(Generic[K]):
    """Queue of keys. Each key joins once and leaves once, whether it waits or is in flight."""

    def __init__(self, config: AdmissionQueueConfig) -> None:
        self._config = config
        self._in_flight: set[K] = set()
        self._rank_by_waiting: dict[K, tuple[int, int]] = {}
        # Keys that left stay in the heap until they reach its top or outnumber those that wait.
        self._heap: list[tuple[int, int, K]] = []
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
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return len(self._rank_by_waiting)

    def join(self, key: K, priority: int) -> bool:
        """Return whether the key is admitted at once. Raises QueueFull."""
        if self.num_in_flight < self._capacity:
            self._in_flight.add(key)
            return True
        if self.num_waiting >= self._config.max_queue:
            raise self._refusal()
        rank = (priority, next(self._numbers))
        self._rank_by_waiting[key] = rank
        heapq.heappush(self._heap, (*rank, key))
        return False

    def leave(self, key: K, now: float) -> K | None:
        """Remove the key and return the one admitted instead, if any."""
        if key in self._in_flight:
            self._in_flight.remove(key)
            self._note_end(now)
            return self._admit_next()
        del self._rank_by_waiting[key]
        if len(self._heap) > 2 * self.num_waiting + 16:
            self._heap = [(*rank, key) for key, rank in self._rank_by_waiting.items()]
            heapq.heapify(self._heap)
        return None

    def retry_after_s(self) -> float:
        """Estimate when the queue will have room: it moves up by one at every end."""
        wait_s = self._interval_s * (self.num_waiting + 1)
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _admit_next(self) -> K | None:
        while self._heap and self.num_in_flight < self._capacity:
            *_, key = heapq.heappop(self._heap)
            if self._rank_by_waiting.pop(key, None) is not None:
                self._in_flight.add(key)
                return key
        return None

    def _note_end(self, now: float) -> None:
        if self._last_end_s is not None:
            self._interval_s += NEWEST_WEIGHT * (now - self._last_end_s - self._interval_s)
        self._last_end_s = now

    def _refusal(self) -> QueueFull:
        wait_s = self.retry_after_s()
        counts = f"{self.num_in_flight} requests are under way and {self.num_waiting} wait"
        return QueueFull(f"the queue is full: {counts}; try again in {wait_s:.1f} s", wait_s)
