"""Control link interface between the KV workers of a pair: two Protocols, no I/O.

A link is one ordered, reliable stream of messages between a D, which receives KV, and a P, which
sends it. D dials, P accepts. The implementation (a gRPC stream in production, plain lists in
tests) provides `Link` and calls `LinkEvents` from any thread.

A lost stream proves nothing about the peer's process or its data path. The KV worker only
concludes that the pair must be linked again.
"""

from __future__ import annotations

from typing import NewType, Protocol

from baton.kv_transfer.protocol.messages import LinkMessage

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
