"""UCXX transport, two-sided: P sends tagged messages, D receives them.

Messages use UCX's rendezvous protocol: P announces a message, then D reads it from P's memory
(CMA) or requests it (TCP). Only messages of a single packet arrive without a request.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    ChannelEvent,
    UcxConfig,
    Write,
    WriteFailed,
    Written,
)
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
from baton.kv_transfer.transports.ucxx_receives import UcxxReceives

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)")
# Excluded: protocols that send without D's request, or leave half a message if P disconnects.
_PROTOCOLS = "^egr/multi/*,rndv/put/*,rndv/send/*"
_TCP_PACKET = "256k"
_MIN_RENDEZVOUS_BYTES = 8192  # messages larger than a packet always use rendezvous
_MAX_ROUNDS = 64  # progress calls per poll
_MAX_IDLE_ROUNDS = 8  # without a receive that begins or ends; CMA fetches 512 KiB in each
_MAX_CLOSE_ROUNDS = 2000
# Per channel, so that a stalled peer cannot occupy more. Enough for a layer of a large chunk: no
# slot is reused before P polls again, after its next layer.
MAX_SLOTS = 16


class UcxxTransport:
    """One UCX context, with one worker per pair."""

    name = "ucxx"
    is_one_sided = False
    moves_device_memory = False

    def __init__(self, region: Region, config: UcxConfig) -> None:
        if region.device != "cpu":
            raise InvalidConfig(
                f"the ucxx transport supports CPU memory only, not {region.device}; use nixl"
            )
        self._ucxx = ucxx = Ucxx()
        self._region = region
        self._staging = Staging()
        try:
            self._context = ucxx.module.UCXContext(
                _ucx_settings(config), (ucxx.module.Feature.TAG,)
            )
        except ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot start: {error!r}") from error

    def open(self) -> UcxxChannel:
        try:
            worker = self._ucxx.module.UCXWorker(self._context)
            return UcxxChannel(self._ucxx, worker, self._region, self._staging)
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot create a worker: {error!r}") from error

    @property
    def ways(self) -> list[str]:
        """UCX resources on this machine, as transport/device: tcp/eth0, cma/memory."""
        return list(dict.fromkeys(_RESOURCE.findall(self._context.info)))

    def close(self) -> None:
        self._context = None


class UcxxChannel:
    """Channel with its own UCX worker and at most one peer."""

    def __init__(self, ucxx: Ucxx, worker: Any, region: Region, staging: Staging) -> None:
        self._ucxx = ucxx
        self._worker = worker
        self._metadata: bytes = worker.address.tobytes()
        self._endpoint: Any = None
        self._staging = staging
        self._receives = UcxxReceives(ucxx, worker, region, staging)
        self._sends = UcxxSends(ucxx, region, staging)

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """Create the endpoint. D sends nothing, but needs an endpoint to force the path closed."""
        if not metadata:
            raise PeerUnreachable("the peer sent no connection data")
        try:
            address = self._ucxx.module.UCXAddress.create_from_buffer(metadata)
            self._endpoint = self._ucxx.module.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot reach the peer: {error!r}") from error
        self._sends.connect(self._endpoint, region)

    def receive_into(self, region: Region) -> None:
        self._receives = UcxxReceives(self._ucxx, self._worker, region, self._staging)

    @property
    def close_stops_writes(self) -> bool:
        return True

    def is_peer_gone(self) -> bool:
        return False  # not needed: `close` stops all writes

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._receives.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self._receives.cancel(ticket)

    def post(self, write: Write) -> None:
        self._sends.post(write)

    def notify(self, ticket: int, note: bytes) -> None:
        """No-op: D counts the received bytes itself."""

    def poll(self) -> list[ChannelEvent]:
        num_idle = 0
        for _ in range(_MAX_ROUNDS):
            self._worker.progress()
            is_moving = self._receives.look() + self._receives.take_messages() > 0
            num_idle = 0 if is_moving else num_idle + 1
            if not self._receives.is_receiving or num_idle == _MAX_IDLE_ROUNDS:
                break
        return [*self._receives.take_events(), *self._sends.look()]

    def close(self) -> None:
        """Force the endpoint closed before the worker is destroyed.

        When UCXX destroys a worker, it receives pending messages and waits for their rest
        indefinitely. Once the endpoint is closed, there is nothing left to wait for.
        """
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=0, max_attempts=1)
        for _ in range(_MAX_CLOSE_ROUNDS):
            self._worker.progress_once()
            # Until they complete, requests and the worker reference each other.
            under_way = (*self._sends.under_way(), *self._receives.under_way())
            if all(request.completed for request in under_way):
                break
        self._receives.close()
        self._sends.close()
        self._endpoint = self._worker = None


def _is_set(name: str) -> bool:
    return f"UCX_{name}" in os.environ


def _ucx_settings(config: UcxConfig) -> dict[str, str]:
    wanted = {
        "TLS": config.tls,
        "NET_DEVICES": config.net_devices,
        "RNDV_THRESH": str(_MIN_RENDEZVOUS_BYTES),
        "PROTOS": _PROTOCOLS,
        # Packet size of the data that D requests; UCX's 8 and 64 KiB are a third slower.
        "TCP_TX_SEG_SIZE": _TCP_PACKET,
        "TCP_RX_SEG_SIZE": _TCP_PACKET,
    }
    if not _is_set("RCACHE_ENABLE"):
        # Enables CMA fetches on endpoints with error handling. The option promises that nobody
        # reads P's memory once P has closed, which CMA cannot guarantee: until D is notified
        # it may continue to read, and discards the data. Without the registration cache,
        # UCX 1.21 crashes at the end of a fetch (UCX PR 11714).
        wanted |= {"RCACHE_ENABLE": "y", "CMA_MEMORY_INVALIDATE": "y"}
    return {name: value for name, value in wanted.items() if value and not _is_set(name)}


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
    """P's side of a UCXX channel: sends the messages of each write and reports its end."""

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
