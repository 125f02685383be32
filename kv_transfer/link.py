"""The control link between two worker halves, as they see it: two Protocols, no I/O.

A link is one ordered, reliable stream of messages between a D and a P. D dials, P
accepts. What carries it (a gRPC stream in production, plain lists in tests) implements
`Link`, and calls `LinkEvents`, from any thread.

Losing the stream says nothing about the peer's process or its data path; the worker half
draws no conclusion from it but that the pair has to start anew.
"""

from __future__ import annotations

from typing import NewType, Protocol

from kv_transfer.messages import LinkMessage

# One stream, from dialled or accepted to its end. Never used again in this process.
LinkId = NewType("LinkId", int)


class Link(Protocol):
    """What the worker half may ask of the carrier. No call blocks or raises.

    On the engine's thread alone, but for `send`, which any thread may call.
    """

    def dial(self, address: str) -> LinkId:
        """Begin a stream to the peer at host:port.

        Messages sent before it stands are kept and go first, in order. If it cannot be
        made, `lost` is called (later, never from inside `dial`).
        """
        ...

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        """Put a message on the stream. Dropped in silence if the stream is over."""
        ...

    def close(self, link_id: LinkId) -> None:
        """End the stream after what was sent on it. `lost` is not called for it any more."""
        ...


class LinkEvents(Protocol):
    """What the carrier tells the worker half, from any thread; it wakes the engine afterwards."""

    def deliver(self, link_id: LinkId, message: LinkMessage) -> None:
        """A message came. An unknown link is one that was just accepted; Hello is its first."""
        ...

    def lost(self, link_id: LinkId, reason: str) -> None:
        """The stream is over: closed by the other side, broken, or never came to be."""
        ...

    def pulse(self) -> None:
        """Called about every second: what must be said although the engine is in a long pass."""
        ...
