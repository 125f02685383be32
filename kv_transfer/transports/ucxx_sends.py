"""P's side of a UCXX channel: sends the messages of each write and reports its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import ChannelEvent, Write, WriteFailed, Written
from baton.kv_transfer.transports.staging import BlockRows, Slot, Staging
from baton.kv_transfer.transports.ucxx_library import Ucxx
from baton.kv_transfer.transports.ucxx_messages import (
    HEADER_BYTES,
    Label,
    MessageRun,
    Parcel,
    encode_header,
    split_write,
)

# Per channel, so that a stalled peer cannot occupy more. Enough for a layer of a large chunk: no
# slot is reused before P polls again, after its next layer.
MAX_SLOTS = 16


@dataclass(frozen=True, slots=True)
class _Send:
    request: Any
    slot: Slot | None


@dataclass(slots=True)
class _Write:
    ticket: int
    waiting: deque[MessageRun | Parcel]  # not sent yet: a parcel needs a free slot
    under_way: list[_Send] = field(default_factory=list)
    failure: str | None = None


class UcxxSends:
    def __init__(self, ucxx: Ucxx, region: Region, staging: Staging) -> None:
        self._ucxx = ucxx
        self._region = region
        self._rows = BlockRows(region)
        self._staging = staging
        self._writes: dict[int, _Write] = {}
        self._num_slots = 0
        self._endpoint: Any = None
        self._peer_region: Region | None = None

    def connect(self, endpoint: Any, region: Region) -> None:
        self._endpoint, self._peer_region = endpoint, region

    def post(self, write: Write) -> None:
        waiting: deque[MessageRun | Parcel] = deque()
        self._writes[write.write_id] = new = _Write(write.ticket, waiting)
        if self._peer_region is None:
            new.failure = "the peer is not connected yet"
            return
        waiting += split_write(write, self._region, self._peer_region)
        self._send_waiting(new, self._peer_region)

    def look(self) -> Iterator[ChannelEvent]:
        """Yield the events of ended writes, and send waiting parcels as slots become free."""
        for write_id, write in list(self._writes.items()):
            self._end_sends(write)
            if self._peer_region is not None:
                self._send_waiting(write, self._peer_region)
            if write.waiting or write.under_way:
                continue
            del self._writes[write_id]
            if write.failure is not None:
                yield WriteFailed(write_id, write.failure)
            else:
                yield Written(write_id)

    def under_way(self) -> Iterator[Any]:
        for write in self._writes.values():
            yield from (send.request for send in write.under_way)

    def close(self) -> None:
        """Drop all sends. Slots that may still be read are not returned to the pool."""
        self._writes.clear()
        self._endpoint = None

    def _send_waiting(self, write: _Write, peer_region: Region) -> None:
        while write.waiting:
            if isinstance(write.waiting[0], Parcel) and self._num_slots == MAX_SLOTS:
                return
            message = write.waiting.popleft()
            try:
                write.under_way.append(self._send(write.ticket, message, peer_region))
            except self._ucxx.error as error:
                write.failure = write.failure or f"post: {error!r}"
                write.waiting.clear()

    def _send(self, ticket: int, message: MessageRun | Parcel, peer_region: Region) -> _Send:
        if isinstance(message, MessageRun):
            tag = Label(ticket, message.offset).to_tag(peer_region)
            return _Send(self._ucxx.send(self._endpoint, message.span, tag), None)
        part = message.layers.byte_range(self._region.block_bytes)
        num_bytes = HEADER_BYTES + len(message.sources) * len(part)
        slot = self._staging.lend()
        self._num_slots += 1
        slot[:HEADER_BYTES] = np.frombuffer(encode_header(message), dtype=np.uint8)
        self._rows.gather(message.sources, message.layers, slot[HEADER_BYTES:num_bytes])
        tag = Label(ticket, is_parcel=True).to_tag(peer_region)
        return _Send(self._ucxx.send(self._endpoint, slot[:num_bytes], tag), slot)

    def _end_sends(self, write: _Write) -> None:
        unfinished = []
        for send in write.under_way:
            if not send.request.completed:
                unfinished.append(send)
                continue
            failure = self._ucxx.failure_of(send.request)
            write.failure = write.failure or failure
            if send.slot is not None:
                self._num_slots -= 1
                self._staging.give_back(send.slot)
        write.under_way = unfinished
        if write.failure is not None:
            write.waiting.clear()
