"""D's side of a UCXX channel: what may come, and where it goes.

No receive is posted ahead of time, for UCXX cannot take a single one back. When a message has
come and its ticket still holds, a run is received into its blocks and a parcel into a slot, whose
parts are copied into the blocks if the ticket holds then, too. Everything else goes into a bin.
So nothing lands that D has not just agreed to, and a cancel ends with the runs that are being
filled at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_transfer.messages import Region
from kv_transfer.staging import SLOT_BYTES, BlockRows, Slot, Staging
from kv_transfer.transport import Arrived, ChannelEvent, Landing, Quieted, Severed
from kv_transfer.types import BlockId
from kv_transfer.ucxx_library import Ucxx
from kv_transfer.ucxx_messages import HEADER_BYTES, Label, NotAParcel, opened, target_of

# Under way at a time. An end that closes has to finish those that fetch by CMA, half a MiB a
# look; all else waits with P.
MAX_RECEIVES = 32
MAX_SLOTS = 4


@dataclass(frozen=True, slots=True)
class _Receive:
    request: Any
    num_bytes: int
    first: int = 0  # of a run: place of its first block
    slot: Slot | None = None  # of a parcel
    bin: Slot | None = None  # to be kept for as long as it is filled


@dataclass(slots=True)
class _Expected:
    """A ticket of D: what has not come, and the receives that are being filled."""

    block_ids: tuple[BlockId, ...]
    num_missing_bytes: list[int]  # of each block
    num_whole: int = 0  # of the blocks, from the first on
    filling: list[_Receive] = field(default_factory=list)
    is_cancelled: bool = False

    def count(self, first: int, num_blocks: int, num_bytes: int) -> None:
        """So many bytes of each of these blocks are in their place."""
        for place in range(first, first + num_blocks):
            self.num_missing_bytes[place] -= num_bytes
        missing = self.num_missing_bytes
        while self.num_whole < len(missing) and missing[self.num_whole] == 0:
            self.num_whole += 1


class Receives:
    def __init__(
        self, ucxx: Ucxx, worker: Any, region: Region, rows: BlockRows, staging: Staging
    ) -> None:
        self._ucxx = ucxx
        self._worker = worker
        self._region = region
        self._rows = rows
        self._staging = staging
        self._expected: dict[int, _Expected] = {}
        self._binned: list[_Receive] = []
        self._num_slots = 0
        self._events: list[ChannelEvent] = []

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._expected[ticket] = _Expected(block_ids, [self._region.block_bytes] * len(block_ids))
        self._end_if_over(ticket)

    def cancel(self, ticket: int) -> None:
        expected = self._expected.get(ticket)
        if expected is None:
            self._events.append(Quieted(ticket))  # all of it had come
            return
        expected.is_cancelled = True
        # What is on its way into a slot gets no further than that.
        self._binned += [one for one in expected.filling if one.slot is not None]
        expected.filling = [one for one in expected.filling if one.slot is None]
        self._end_if_over(ticket)

    @property
    def is_filling(self) -> bool:
        return any(True for _ in self._all())

    def take_messages(self) -> int:
        """How many have come for which there was room."""
        room = MAX_RECEIVES - sum(1 for _ in self._all())
        for num_taken in range(room):
            message = self._ucxx.probe(self._worker) if self._num_slots < MAX_SLOTS else None
            if message is None:
                return num_taken
            self._take(message)
        return room

    def look(self) -> int:
        """How many receives have ended."""
        num_ended = 0
        for binned in [one for one in self._binned if one.request.completed]:
            num_ended += 1
            self._binned.remove(binned)
            self._give_back(binned)
        for ticket, expected in list(self._expected.items()):
            num_whole = expected.num_whole
            for receive in [one for one in expected.filling if one.request.completed]:
                num_ended += 1
                expected.filling.remove(receive)
                self._end(receive, expected)
            if expected.num_whole > num_whole:
                self._events.append(Landing(ticket, expected.num_whole))
            self._end_if_over(ticket)
        return num_ended

    def take_events(self) -> list[ChannelEvent]:
        events, self._events = self._events, []
        return events

    def under_way(self) -> Iterator[Any]:
        yield from (receive.request for receive in self._all())

    def close(self) -> None:
        """Slots that may still be filled are let go of, and lent to nobody."""
        self._expected.clear()
        self._binned.clear()
        self._worker = None

    def _all(self) -> Iterator[_Receive]:
        yield from self._binned
        for expected in self._expected.values():
            yield from expected.filling

    def _take(self, message: Any) -> None:
        label = Label.from_tag(message.sender_tag.value, self._region)
        expected = self._expected.get(label.ticket)
        if expected is None or expected.is_cancelled:
            self._bin(message)
        elif label.is_parcel:
            self._take_parcel(message, expected)
        else:
            self._take_run(message, expected, label)

    def _take_parcel(self, message: Any, expected: _Expected) -> None:
        if not HEADER_BYTES < message.length <= SLOT_BYTES:
            self._refuse(message)
            return
        slot = self._staging.lend()
        self._num_slots += 1
        request = self._ucxx.receive(self._worker, message, slot[: message.length])
        expected.filling.append(_Receive(request, message.length - HEADER_BYTES, slot=slot))

    def _take_run(self, message: Any, expected: _Expected, label: Label) -> None:
        target = target_of(label, message.length, expected.block_ids, self._region)
        if target is None:
            self._refuse(message)
            return
        request = self._ucxx.receive(self._worker, message, target)
        first = label.offset // self._region.block_bytes
        expected.filling.append(_Receive(request, target.num_bytes, first))

    def _refuse(self, message: Any) -> None:
        self._bin(message)
        self._events.append(Severed(f"a message of {message.length} bytes does not fit"))

    def _bin(self, message: Any) -> None:
        memory = np.empty(max(1, message.length), dtype=np.uint8)
        request = self._ucxx.receive(self._worker, message, memory)
        self._binned.append(_Receive(request, 0, bin=memory))

    def _end(self, receive: _Receive, expected: _Expected) -> None:
        failure = self._ucxx.failure_of(receive.request)
        if failure is None and receive.slot is not None:
            failure = self._unpack(receive.slot, receive.num_bytes, expected)
        elif failure is None:
            num_blocks = -(-receive.num_bytes // self._region.block_bytes)
            expected.count(receive.first, num_blocks, receive.num_bytes // num_blocks)
        self._give_back(receive)
        if failure is not None and not expected.is_cancelled:
            self._events.append(Severed(f"receive: {failure}"))

    def _unpack(self, slot: Slot, num_bytes: int, expected: _Expected) -> str | None:
        """Into the blocks of a ticket that holds; what is wrong with it otherwise."""
        header = slot[:HEADER_BYTES].tobytes()
        try:
            places, layers = opened(
                header, num_bytes, len(expected.block_ids), self._region.block_bytes
            )
        except NotAParcel as error:
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
            self._events.append(Quieted(ticket))
        elif expected.num_whole == len(expected.block_ids):
            del self._expected[ticket]
            self._events.append(Arrived(ticket))
