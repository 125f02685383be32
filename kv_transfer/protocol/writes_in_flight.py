"""P's writes in flight: their hand-offs, and the bytes in flight per link."""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.link import LinkId
from kv_transfer.protocol.outgoing import OutgoingHandoff, WriteInFlight
from kv_transfer.types import HandoffId


@dataclass(slots=True)
class Flights:
    max_bytes: int  # per link
    _handoff_by_write: dict[int, HandoffId] = field(default_factory=dict)
    _bytes_by_link: dict[LinkId, int] = field(default_factory=dict)
    _num_begun: int = 0

    def __bool__(self) -> bool:
        return bool(self._handoff_by_write)

    def room_bytes(self, link_id: LinkId) -> int:
        return self.max_bytes - self._bytes_by_link.get(link_id, 0)

    def begin(self, outgoing: OutgoingHandoff, link_id: LinkId, flight: WriteInFlight) -> int:
        """Register a write and return its id."""
        self._num_begun += 1
        outgoing.in_flight[self._num_begun] = flight
        self._handoff_by_write[self._num_begun] = outgoing.handoff_id
        num_bytes = self._bytes_by_link.get(link_id, 0) + flight.num_bytes
        self._bytes_by_link[link_id] = num_bytes
        return self._num_begun

    def get_handoff(self, write_id: int) -> HandoffId | None:
        """Return the hand-off of a write; None if it is unknown or has ended."""
        return self._handoff_by_write.get(write_id)

    def end(self, outgoing: OutgoingHandoff, link_id: LinkId, write_id: int) -> None:
        del self._handoff_by_write[write_id]
        self._bytes_by_link[link_id] -= outgoing.in_flight.pop(write_id).num_bytes

    def end_all(self, outgoing: OutgoingHandoff) -> None:
        """End all writes of a send whose link is cut."""
        for write_id in outgoing.in_flight:
            del self._handoff_by_write[write_id]
        outgoing.in_flight.clear()

    def forget(self, link_id: LinkId) -> None:
        self._bytes_by_link.pop(link_id, None)
