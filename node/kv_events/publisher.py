"""Publisher of a node's KV events over ZeroMQ, with vLLM's protocol.

Each message has three frames: topic, sequence number (8 bytes, big-endian) and payload. A PUB
socket sends it to all subscribers, without waiting for any. A ROUTER socket serves replays: a
request has an empty frame and the first sequence number wanted; the answer is one message for each
that is still known, with an empty frame before the three, and an end marker.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import Thread
from typing import NamedTuple

import zmq

from engine.events import AllBlocksCleared, KvEvent
from errors import InvalidConfig
from node.kv_events.config import KvEventsConfig, is_bound
from node.kv_events.history import EventHistory
from node.kv_events.messages import CacheFacts, encode_batch

log = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)


class _Update(NamedTuple):
    sequence: int
    time_s: float
    events: Sequence[KvEvent]


class KvEventPublisher:
    """Publishes on its own thread for the duration of a `with` block."""

    def __init__(
        self,
        config: KvEventsConfig,
        facts: CacheFacts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._facts = facts
        self._clock = clock
        self._topic = config.topic.encode()
        self._history = EventHistory(facts, config.buffer_steps)
        self._queue: deque[_Update] = deque()
        self._next_sequence = 0
        self._has_dropped = False  # since the last update that was queued
        self._is_stopping = False
        self._waker: socket.socket | None = None
        self._sockets = ExitStack()
        self._thread = Thread(target=self._run, name="kv-events", daemon=True)

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Queue events. Must always be called on the same thread; never waits.

        If the queue is full, they are dropped, which subscribers see as a missing sequence number,
        also in replays. The next message then begins with AllBlocksCleared.
        """
        if not events:
            return
        sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
        if len(self._queue) >= self._config.max_queue_size:
            self._note_drop()
            return
        if self._has_dropped:
            events = (AllBlocksCleared(), *events)
            self._has_dropped = False
        self._queue.append(_Update(sequence, self._clock(), events))
        self._wake()

    def __enter__(self) -> KvEventPublisher:
        """Open the sockets. Raises InvalidConfig if that fails."""
        config = self._config
        with ExitStack() as opened:
            self._context = zmq.Context()
            opened.callback(self._context.destroy, linger=0)
            self._pub = self._open(zmq.PUB, config.hwm, "--kv-events-endpoint", config.endpoint)
            self._replays: zmq.Socket[bytes] | None = None
            if config.replay_endpoint:
                # A whole replay fits into the queue of a subscriber that has read the one before:
                # ZeroMQ may count up to half of the queue as full that has been read.
                hwm = 2 * (config.buffer_steps + 2)
                option = "--kv-events-replay-endpoint"
                self._replays = self._open(zmq.ROUTER, hwm, option, config.replay_endpoint)
                self._replays.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._wakeups, self._waker = map(opened.enter_context, socket.socketpair())
            self._waker.setblocking(False)
            self._sockets = opened.pop_all()
        self._thread.start()
        log.info("KV events are published on %s", config.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake()
        self._thread.join()
        self._sockets.close()

    def _open(self, kind: int, hwm: int, option: str, endpoint: str) -> zmq.Socket[bytes]:
        opened: zmq.Socket[bytes] = self._context.socket(kind)
        opened.set_hwm(hwm)
        opened.setsockopt(zmq.IPV6, int("[" in endpoint))
        is_replay = kind == zmq.ROUTER
        try:
            (opened.bind if is_replay or is_bound(endpoint) else opened.connect)(endpoint)
        except zmq.ZMQError as error:
            raise InvalidConfig(f"{option} {endpoint}: {error}") from error
        return opened

    def _note_drop(self) -> None:
        if not self._has_dropped:
            log.warning(
                "KV events are dropped: %d updates wait to be published; subscribers will see a "
                "gap and forget all blocks",
                len(self._queue),
            )
        self._has_dropped = True

    def _wake(self) -> None:
        if self._waker is None:  # the thread begins with what is queued
            return
        try:
            self._waker.send(b"\0")
        except BlockingIOError:  # so many wake-ups are pending that another one changes nothing
            return

    # --- the publishing thread --------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            log.exception("no KV events are published any more")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeups, zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, zmq.POLLIN)
        while not self._is_stopping:
            self._publish_queued()
            ready = dict(poller.poll())
            if self._wakeups.fileno() in ready:
                self._wakeups.recv(4096)
            if self._replays is not None and self._replays in ready:
                self._serve_replay(self._replays)

    def _publish_queued(self) -> None:
        while self._queue:
            sequence, time_s, events = self._queue.popleft()
            payload = encode_batch(self._facts.to_batch(events, time_s))
            self._history.append(sequence, payload)
            self._pub.send_multipart([self._topic, _packed(sequence), payload])

    def _serve_replay(self, replays: zmq.Socket[bytes]) -> None:
        frames = replays.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            log.warning("a replay request with %d frames was ignored", len(frames))
            return
        client, empty, first = frames
        try:
            for sequence, payload in self._history.since(int.from_bytes(first, "big")):
                message = [client, empty, self._topic, _packed(sequence), payload]
                replays.send_multipart(message, zmq.NOBLOCK)
            replays.send_multipart([client, empty, b"", END_OF_REPLAY, b""], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("a replay of KV events was broken off: %s", error)


def _packed(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")
