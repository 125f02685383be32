"""D's side of a UCXX channel: receives messages into granted blocks.

No receive is posted in advance, because UCXX cannot cancel a single one. When a message arrives
and its ticket is valid, a run is received into its blocks, and a parcel into a slot. The parcel is
copied into the blocks if the ticket is still valid then. Any other message is received into a
buffer that is discarded. So data only lands with D's current consent, and a cancel completes as
soon as the runs being received at that moment have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Arrived,
    BlocksLanded,
    CancelCompleted,
    ChannelBroken,
    ChannelEvent,
)
from baton.kv_transfer.transports.staging import SLOT_BYTES, BlockRows, Slot, Staging
from baton.kv_transfer.transports.ucxx_library import Ucxx
from baton.kv_transfer.transports.ucxx_messages import (
    HEADER_BYTES,
    InvalidParcel,
    Label,
    find_target,
    parse_parcel_header,
)

# Concurrent receives. Closing a channel must finish those that fetch by CMA, at 512 KiB per
# progress call. All further messages wait on P.
MAX_RECEIVES = 32
MAX_SLOTS = 4


@dataclass(frozen=True, slots=True)
class _Receive:
    request: Any
    num_bytes: int
    first: int = 0  # runs: index of the first block in the grant
    slot: Slot | None = None  # parcels
    discard_buffer: Slot | None = None  # keeps the buffer alive while UCX writes to it


@dataclass(slots=True)
class _Expected:
    """A valid or cancelled ticket of D: its missing bytes and its active receives."""

    block_ids: tuple[BlockId, ...]
    num_missing_bytes: list[int]  # per block
    num_whole: int = 0  # leading blocks that are complete
    filling: list[_Receive] = field(default_factory=list)
    is_cancelled: bool = False

    def count(self, first: int, num_blocks: int, num_bytes: int) -> None:
        """Record `num_bytes` received bytes for each of these blocks."""
        for place in range(first, first + num_blocks):
            self.num_missing_bytes[place] -= num_bytes
        missing = self.num_missing_bytes
        while self.num_whole < len(missing) and missing[self.num_whole] == 0:
            self.num_whole += 1


class UcxxReceives:
    def __init__(self, ucxx: Ucxx, worker: Any, region: Region, staging: Staging) -> None:
        self._ucxx = ucxx
        self._worker = worker
        self._region = region
        self._rows = BlockRows(region)
        self._staging = staging
        self._expected: dict[int, _Expected] = {}
        self._discarded: list[_Receive] = []
        self._num_slots = 0
        self._events: list[ChannelEvent] = []

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._expected[ticket] = _Expected(block_ids, [self._region.block_bytes] * len(block_ids))
        self._end_if_over(ticket)

    def cancel(self, ticket: int) -> None:
        expected = self._expected.get(ticket)
        if expected is None:
            self._events.append(CancelCompleted(ticket))  # everything had been received
            return
        expected.is_cancelled = True
        # Parcels stay in their slots: they are not copied into the blocks.
        self._discarded += [receive for receive in expected.filling if receive.slot is not None]
        expected.filling = [receive for receive in expected.filling if receive.slot is None]
        self._end_if_over(ticket)

    @property
    def is_receiving(self) -> bool:
        return any(True for _ in self._all_receives())

    def take_messages(self) -> int:
        """Start receiving incoming messages, within the limits. Return their number."""
        room = MAX_RECEIVES - sum(1 for _ in self._all_receives())
        for num_taken in range(room):
            message = self._ucxx.probe(self._worker) if self._num_slots < MAX_SLOTS else None
            if message is None:
                return num_taken
            self._receive_message(message)
        return room

    def look(self) -> int:
        """Process completed receives. Return their number."""
        num_ended = 0
        for receive in [discarded for discarded in self._discarded if discarded.request.completed]:
            num_ended += 1
            self._discarded.remove(receive)
            self._give_back(receive)
        for ticket, expected in list(self._expected.items()):
            num_whole = expected.num_whole
            for receive in [active for active in expected.filling if active.request.completed]:
                num_ended += 1
                expected.filling.remove(receive)
                self._end(receive, expected)
            if expected.num_whole > num_whole:
                self._events.append(BlocksLanded(ticket, expected.num_whole))
            self._end_if_over(ticket)
        return num_ended

    def take_events(self) -> list[ChannelEvent]:
        events, self._events = self._events, []
        return events

    def under_way(self) -> Iterator[Any]:
        yield from (receive.request for receive in self._all_receives())

    def close(self) -> None:
        """Drop all receives. Slots that may still be written to are not returned to the pool."""
        self._expected.clear()
        self._discarded.clear()
        self._worker = None

    def _all_receives(self) -> Iterator[_Receive]:
        yield from self._discarded
        for expected in self._expected.values():
            yield from expected.filling

    def _receive_message(self, message: Any) -> None:
        label = Label.from_tag(message.sender_tag.value, self._region)
        expected = self._expected.get(label.ticket)
        if expected is None or expected.is_cancelled:
            self._discard(message)
        elif label.is_parcel:
            self._receive_parcel(message, expected)
        else:
            self._receive_run(message, expected, label)

    def _receive_parcel(self, message: Any, expected: _Expected) -> None:
        if not HEADER_BYTES < message.length <= SLOT_BYTES:
            self._refuse(message)
            return
        slot = self._staging.lend()
        self._num_slots += 1
        request = self._ucxx.receive(self._worker, message, slot[: message.length])
        expected.filling.append(_Receive(request, message.length - HEADER_BYTES, slot=slot))

    def _receive_run(self, message: Any, expected: _Expected, label: Label) -> None:
        target = find_target(label, message.length, expected.block_ids, self._region)
        if target is None:
            self._refuse(message)
            return
        request = self._ucxx.receive(self._worker, message, target)
        first = label.offset // self._region.block_bytes
        expected.filling.append(_Receive(request, target.num_bytes, first))

    def _refuse(self, message: Any) -> None:
        self._discard(message)
        self._events.append(
            ChannelBroken(f"a message of {message.length} bytes does not fit its grant")
        )

    def _discard(self, message: Any) -> None:
        buffer = np.empty(max(1, message.length), dtype=np.uint8)
        request = self._ucxx.receive(self._worker, message, buffer)
        self._discarded.append(_Receive(request, 0, discard_buffer=buffer))

    def _end(self, receive: _Receive, expected: _Expected) -> None:
        failure = self._ucxx.failure_of(receive.request)
        if failure is None and receive.slot is not None:
            failure = self._unpack(receive.slot, receive.num_bytes, expected)
        elif failure is None:
            num_blocks = -(-receive.num_bytes // self._region.block_bytes)
            expected.count(receive.first, num_blocks, receive.num_bytes // num_blocks)
        self._give_back(receive)
        if failure is not None and not expected.is_cancelled:
            self._events.append(ChannelBroken(f"receive: {failure}"))

    def _unpack(self, slot: Slot, num_bytes: int, expected: _Expected) -> str | None:
        """Copy a parcel into the blocks of its ticket. Return the error if it is malformed."""
        header = slot[:HEADER_BYTES].tobytes()
        try:
            places, layers = parse_parcel_header(
                header, num_bytes, len(expected.block_ids), self._region.block_bytes
            )
        except InvalidParcel as error:
            return str(error)
        block_ids = expected.block_ids[places.start : places.stop]
        self._rows.scatter(block_ids, layers, slot[HEADER_BYTES : HEADER_BYTES + num_bytes])
        expected.count(places.start, len(places), num_bytes // len(places))
        return None

    def _give_back(self, receive: _Receive) -> None:
        if receive.slot is not None:
            self._num_slots -= 1
            self._staging.give_back(receive.slot)

    def _end_if_over(self, ticket: int) -> None:
        expected = self._expected[ticket]
        if expected.filling:
            return
        if expected.is_cancelled:
            del self._expected[ticket]
            self._events.append(CancelCompleted(ticket))
        elif expected.num_whole == len(expected.block_ids):
            del self._expected[ticket]
            self._events.append(Arrived(ticket))
