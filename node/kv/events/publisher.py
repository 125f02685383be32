"""Publisher of a node's KV events with ZeroMQ's protocol and vLLM's messages.

Each message has three frames: topic, sequence number (8 bytes, big-endian) and payload. A PUB
socket sends it to all subscribers, without waiting for any. A subscription begins with the messages
that are still known, so that late subscribers learn all that is cached. A ROUTER socket serves
replays: a request has an empty frame and the first sequence number wanted; the answer is one
message for each that is still known, with an empty frame before the three, and an end marker.

Subscribers and replays read the messages from the history, each at its own pace, so that slow ones
take no memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from threading import Thread

from baton.engine.events import AllBlocksCleared, KvEvent
from baton.node.kv.events.config import KvEventsConfig, is_bound
from baton.node.kv.events.history import EventHistory, SentMessage
from baton.node.kv.events.messages import CacheFacts, encode_batch
from baton.node.kv.events.peers import (
    PEER_ERRORS,
    PeerListener,
    ServePeer,
    check_target,
    dial,
    listen,
)
from baton.node.kv.events.zmtp import READ_PAUSE_S, SocketType, ZmtpPeer

log = logging.getLogger(__name__)

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
# Of a whole replay, also to a peer that reads slowly.
REPLAY_LIMIT_S = 60.0
# Pace of all replays together, which bounds their share of a core: a message takes about 30 us.
REPLAY_EVERY_S = 0.0001
REPLAY_BURST_S = 0.05  # of messages that replays may send without waiting after a pause
SUBSCRIBE, CANCEL = b"\x01", b"\x00"


class KvEventPublisher:
    """Publishes on its own thread for the duration of a `with` block."""

    def __init__(self, config: KvEventsConfig, facts: CacheFacts) -> None:
        self._config = config
        self._facts = facts
        self._topic = config.topic.encode()
        self._history = EventHistory(facts, config.buffer_steps)
        # Updates to publish: sequence number, time, events.
        self._queue: deque[tuple[int, float, Sequence[KvEvent]]] = deque()
        self._next_sequence = 0
        self._has_dropped = False  # since the last update that was queued
        self._is_stopping = False
        self._next_replay_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queued = asyncio.Event()
        self._grown = asyncio.Event()  # replaced by another one with each message
        self._work: list[Callable[[], Coroutine[object, object, None]]] = []
        self._sockets = ExitStack()

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
        self._queue.append((sequence, time.time(), events))
        self._wake()

    def __enter__(self) -> KvEventPublisher:
        """Open the sockets. Raises InvalidConfig if that fails."""
        config = self._config
        with ExitStack() as opened:
            self._open("--kv-events-endpoint", config.endpoint, SocketType.PUB, opened)
            if config.replay_endpoint:
                option = "kv-events-replay-endpoint"
                self._open(option, config.replay_endpoint, SocketType.ROUTER, opened)
            self._sockets = opened.pop_all()
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._run, args=(self._loop,), name="kv-events", daemon=True)
        self._thread.start()
        log.info("KV events are published on %s", config.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping = True
        self._wake()
        self._thread.join()
        self._sockets.close()

    def _open(self, option: str, endpoint: str, kind: SocketType, opened: ExitStack) -> None:
        is_pub = kind is SocketType.PUB
        serve: ServePeer = self._serve_subscriber if is_pub else self._serve_replays
        if is_pub and not is_bound(endpoint):
            check_target(option, endpoint)
            self._work.append(lambda: dial(endpoint, kind, serve))
            return
        listening = opened.enter_context(listen(option, endpoint, self._config.host))
        self._work.append(PeerListener(listening, kind, serve).run)

    def _note_drop(self) -> None:
        if not self._has_dropped:
            log.warning(
                "KV events are dropped: %d updates wait to be published; subscribers will see a "
                "gap and forget all blocks",
                len(self._queue),
            )
        self._has_dropped = True

    def _wake(self) -> None:
        if self._loop is None:  # the thread begins with what is queued
            return
        try:
            self._loop.call_soon_threadsafe(self._queued.set)
        except RuntimeError:  # the thread has ended
            return

    # --- the publishing thread --------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._serve())
        except Exception:
            log.exception("no KV events are published any more")

    async def _serve(self) -> None:
        """Returns when the publisher stops; that ends all connections."""
        tasks = [asyncio.ensure_future(work()) for work in self._work]
        while not self._is_stopping:
            self._queued.clear()
            self._publish_queued()
            await self._queued.wait()
        for task in tasks:
            task.cancel()

    def _publish_queued(self) -> None:
        while self._queue:
            sequence, time_s, events = self._queue.popleft()
            payload = encode_batch(self._facts.to_batch(events, time_s))
            self._history.append(sequence, payload)
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def _serve_subscriber(self, peer: ZmtpPeer) -> None:
        prefixes: set[bytes] = set()  # of the topic
        sending: asyncio.Task[None] | None = None
        try:
            while True:
                self._note_subscription(await peer.receive(), prefixes)
                if prefixes and sending is None:
                    sending = asyncio.ensure_future(self._send_events(peer))
                elif sending is not None and not prefixes:
                    sending.cancel()
                    sending = None
                await asyncio.sleep(READ_PAUSE_S)
        finally:
            if sending is not None:
                sending.cancel()

    def _note_subscription(self, frames: list[bytes], prefixes: set[bytes]) -> None:
        """Subscriptions to other topics than the one of this publisher are not kept."""
        kind, prefix = frames[0][:1], frames[0][1:]
        if kind == SUBSCRIBE and self._topic.startswith(prefix):
            prefixes.add(prefix)
        elif kind == CANCEL:
            prefixes.discard(prefix)

    async def _send_events(self, peer: ZmtpPeer) -> None:
        """Send everything that is cached, then each message. Slow peers miss the oldest ones."""
        sequence = 0
        try:
            for known in self._history.since(0):
                await self._take_replay_turn()
                await peer.send(self._frames(known))
                sequence = known.sequence + 1
            while True:
                grown = self._grown
                sequence = max(sequence, self._history.end - self._config.hwm)
                if (message := self._history.first_from(sequence)) is None:
                    await grown.wait()
                    continue
                await peer.send(self._frames(message))
                sequence = message.sequence + 1
        except PEER_ERRORS as error:
            log.debug("a subscriber to KV events is disconnected: %r", error)
            peer.abort()

    async def _serve_replays(self, peer: ZmtpPeer) -> None:
        while True:
            frames = await peer.receive()
            if len(frames) == 2 and len(frames[1]) == SEQUENCE_BYTES:
                async with asyncio.timeout(REPLAY_LIMIT_S):
                    await self._replay(peer, frames[0], int.from_bytes(frames[1], "big"))
            await asyncio.sleep(READ_PAUSE_S)

    async def _replay(self, peer: ZmtpPeer, empty: bytes, first: int) -> None:
        for message in self._history.since(first):
            await self._take_replay_turn()
            await peer.send([empty, *self._frames(message)])
        await peer.send([empty, b"", END_OF_REPLAY, b""])

    async def _take_replay_turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        earliest_s = max(self._next_replay_s, now_s - REPLAY_BURST_S)
        self._next_replay_s = earliest_s + REPLAY_EVERY_S
        await asyncio.sleep(max(0.0, self._next_replay_s - now_s))

    def _frames(self, message: SentMessage) -> tuple[bytes, bytes, bytes]:
        return self._topic, message.sequence.to_bytes(SEQUENCE_BYTES, "big"), message.payload
