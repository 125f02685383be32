"""Control link between the KV workers of a pair: two Protocols and an inbox, no I/O.

A link is one ordered, reliable stream of messages between a D, which receives KV, and a P, which
sends it. D dials, P accepts. The implementation (a gRPC stream in production, plain lists in
tests) provides `Link` and calls `LinkEvents` from any thread.

A lost stream proves nothing about the peer's process or its data path. The KV worker only
concludes that the pair must be linked again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NewType, Protocol

from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.protocol.messages import LinkMessage, Renew, Renewed

# Identifies one stream from dial or accept to its end. Never reused in a process.
LinkId = NewType("LinkId", int)


class Link(Protocol):
    """Outgoing side of the control link. Calls do not block or raise.

    Engine thread only, except for `send`, which is thread-safe.
    """

    def dial(self, address: str) -> LinkId:
        """Open a stream to the peer at host:port.

        Messages sent before it is established are queued and delivered first, in order. On
        failure `lost` is called, later and never from inside `dial`.
        """
        ...

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        """Send a message. Silently dropped if the stream has ended."""
        ...

    def close(self, link_id: LinkId) -> None:
        """End the stream after the messages sent so far. `lost` is not called for it any more."""
        ...


class LinkEvents(Protocol):
    """Events of the control link. Thread-safe; the caller wakes the engine afterwards."""

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        """Deliver a message. An unknown `link_id` is a newly accepted link, starting with Hello."""
        ...

    def lost(self, link_id: LinkId, reason: str) -> None:
        """Report the end of a stream: closed by the peer, broken, or never established."""
        ...

    def pulse(self) -> None:
        """Send keep-alives that are due during a long forward pass. Called about every second."""
        ...


class Inbox:
    """Implements LinkEvents: queues messages for the engine thread, and sends keep-alives.

    A peer must not mistake a node in a long forward pass for a dead one. The link's threads
    therefore send keep-alives, as long as the engine thread has been active within `busy_s`.
    """

    def __init__(self, link: Link, config: KvWorkerConfig, clock: Callable[[], float]) -> None:
        self._link = link
        self._busy_s = config.busy_s
        self._pulse_after_s = config.receiver.renew_every_s
        self._clock = clock
        self._messages: deque[tuple[LinkId, LinkMessage | str]] = deque()
        self._last_active_s = clock()
        self._keep_alives: tuple[tuple[LinkId, Renew], ...] = ()

    # --- Any thread ------------------------------------------------------------------------

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        self._messages.append((link_id, message))
        if isinstance(message, Renew) and self._inactive_s() < self._busy_s:
            self._link.send(link_id, Renewed(message.handoff_ids))

    def lost(self, link_id: LinkId, reason: str) -> None:
        self._messages.append((link_id, reason))

    def pulse(self) -> None:
        if self._pulse_after_s <= self._inactive_s() < self._busy_s:
            for link_id, renew in self._keep_alives:
                self._link.send(link_id, renew)

    def _inactive_s(self) -> float:
        """Time since the engine thread last emptied the inbox."""
        return self._clock() - self._last_active_s

    # --- The engine thread -----------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._messages)

    def take(self) -> Iterator[tuple[LinkId, LinkMessage | str]]:
        """Yield the queued messages; a lost link yields its reason. Marks the thread as active."""
        self._last_active_s = self._clock()
        while self._messages:
            yield self._messages.popleft()

    def set_keep_alives(self, keep_alives: tuple[tuple[LinkId, Renew], ...]) -> None:
        """Set the messages that `pulse` sends while the engine thread is in a long pass."""
        self._keep_alives = keep_alives
