"""Reader of KV from vLLM servers, on a thread of its own.

The thread talks to the servers and reads their blocks into staging memory. The engine thread
converts them into its own, so that they are written between passes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

import zmq

from baton.core.foreign_kv import ForeignKv
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.foreign_kv import (
    ForeignOrder,
    ForeignPull,
    ForeignPulled,
    ForeignPullId,
)
from baton.kv_transfer.types import NO_REPORTS, KvOrders, KvReports
from baton.node.kv.foreign.config import ForeignSource
from baton.node.kv.foreign.connection import (
    LEASE_SHARE,
    PullEnded,
    PullFailure,
    ReadSettings,
    ServerConnection,
)
from baton.node.kv.foreign.session import RunRead
from baton.telemetry.metrics import names as counted
from baton.telemetry.metrics.instruments import Reading

log = logging.getLogger(__name__)

BUSY_POLL_MS = 1
WAITING_POLL_MS = 10
WAKE = (1).to_bytes(8, "little")

# Begins to convert blocks that were read into those of their pull.
ConvertRun = Callable[[RunRead], Fence]


class VllmReader(KvDriver):
    """Implements ForeignReader. Runs its thread within a `with` block.

    When a pull has ended, it wakes the engine, which then polls.
    """

    def __init__(
        self,
        sources: Sequence[ForeignSource],
        settings: ReadSettings,
        convert: ConvertRun,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.failures: Counter[str] = Counter({failure.value: 0 for failure in PullFailure})
        self.num_bytes = 0  # read since the start
        self._num_blocks = Counter(filled=0, failed=0)  # of pulls
        self._connections = {
            source.address: ServerConnection(
                source, settings, self._note, self._context, self.failures, clock
            )
            for source in sources
        }
        self._convert = convert
        self._wake_engine = wake
        self._clock = clock
        self._orders: deque[ForeignOrder | RunRead] = deque()
        self._events: deque[RunRead | PullEnded] = deque()
        self._unlisted: set[str] = set()  # servers that routers have named
        self._filled: dict[ForeignPullId, list[bool]] = {}
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="foreign KV")

    def __enter__(self) -> VllmReader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake_thread()
        self._thread.join()
        self._context.destroy(linger=0)
        os.close(self._wakeup)

    def allows(self, kv: ForeignKv) -> bool:
        return kv.address in self._connections

    # --- ForeignReader: the engine thread --------------------------------------------

    def may_read(self, kv: ForeignKv, received_s: float, now: float) -> bool:
        connection = self._connections.get(kv.address)
        if connection is None and kv.address not in self._unlisted:
            self._unlisted.add(kv.address)
            log.warning("%s is not among the --kv-sources: its KV is not read", kv.address)
        if connection is None or now < connection.avoided_until_s:
            return False
        return now < received_s + LEASE_SHARE * connection.source.lease_s

    def start(self, orders: KvOrders, now: float) -> None:
        for order in orders.foreign:
            if isinstance(order, ForeignPull):
                self._filled[order.pull_id] = [False] * len(order.places)
            self._orders.append(order)
        if orders.foreign:
            self._wake_thread()

    def poll(self, now: float) -> KvReports:
        ended: list[ForeignPulled] = []
        while self._events:
            event = self._events.popleft()
            if isinstance(event, RunRead):
                self._fill(event)
            else:
                are_filled = tuple(self._filled.pop(event.pull_id))
                self._num_blocks["filled"] += are_filled.count(True)
                self._num_blocks["failed"] += are_filled.count(False)
                ended.append(ForeignPulled(event.pull_id, are_filled))
        return KvReports(foreign=tuple(ended)) if ended else NO_REPORTS

    def gauges(self) -> Reading:
        return {
            counted.FOREIGN_BYTES: self.num_bytes,
            counted.FOREIGN_BLOCKS: dict(self._num_blocks),
            counted.FOREIGN_FAILURES: dict(self.failures),
        }

    def _fill(self, read: RunRead) -> None:
        """Convert a run that was read, and return its bay."""
        fence = self._convert(read)
        # The bay is overwritten or freed next. On the CPU, the fence has passed.
        fence.wait()
        filled, run = self._filled[read.pull.pull_id], read.run
        filled[run.target.start : run.target.stop] = [True] * len(run.target)
        self.num_bytes += len(run.source) * read.blocks.layout.block_bytes
        self._orders.append(read)
        self._wake_thread()

    # --- the reader's thread --------------------------------------------------------

    def _note(self, event: RunRead | PullEnded) -> None:
        self._events.append(event)
        self._wake_engine()

    def _wake_thread(self) -> None:
        os.write(self._wakeup, WAKE)

    def _run(self) -> None:
        while not self._is_stopping:
            self._take_orders()
            for connection in self._connections.values():
                self._guard(connection, connection.advance)
            self._wait()
        for connection in self._connections.values():
            connection.close()

    def _take_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, RunRead):
                order.give_back(order.bay)
                continue
            connection = self._connections.get(order.kv.address)
            if connection is None:
                continue  # it was never dialled, and holds the KV for its lease
            if isinstance(order, ForeignPull):
                self._guard(connection, partial(connection.pull, order))
            else:
                self._guard(connection, partial(connection.release, order))

    def _guard(self, connection: ServerConnection, call: Callable[[float], None]) -> None:
        """Make a call. A bug costs the pulls of one server only."""
        now = self._clock()
        try:
            call(now)
        except Exception as error:
            log.exception("reading KV from %s failed", connection.source.address)
            connection.fail(PullFailure.READ, repr(error), now)

    def _wait(self) -> None:
        """Wait for orders, handshakes, or the time of the next look at a read."""
        now, connections = self._clock(), self._connections.values()
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        for connection in connections:
            if connection.socket is not None:
                poller.register(connection.socket, zmq.POLLIN)
        if any(connection.is_busy(now) for connection in connections):
            timeout_ms: int | None = BUSY_POLL_MS
        elif any(connection.is_waiting(now) for connection in connections):
            timeout_ms = WAITING_POLL_MS
        else:
            timeout_ms = None
        if dict(poller.poll(timeout_ms)).get(self._wakeup):
            os.read(self._wakeup, len(WAKE))
