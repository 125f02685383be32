"""UCXX, two-sided: P sends tagged messages, D receives them. The only module that imports ucxx.

D posts no receive ahead of time, for UCXX cannot take a single one back. It probes for messages
instead, and posts the receive into the granted blocks when one has come and its ticket still
holds; what comes for a cancelled ticket is received into a bin. So nothing lands that D has not
just agreed to, and a cancel ends with the receives that are being filled at that moment.
"""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kv_transfer.errors import InvalidKvSetting, PeerUnreachable, TransportMissing
from kv_transfer.messages import Region
from kv_transfer.spans import Span, pair_spans, spans
from kv_transfer.transport import (
    Arrived,
    ChannelEvent,
    Quieted,
    Severed,
    Write,
    WriteFailed,
    Written,
)
from kv_transfer.types import BlockId

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)")
_PLACE_BITS = 32  # a tag is the ticket, then the place of its first block in the grant
_PLACE_MASK = (1 << _PLACE_BITS) - 1


@dataclass(frozen=True, slots=True)
class UcxxConfig:
    """UCX settings of this transport alone. An UCX_* variable of the environment goes first."""

    tls: str = ""  # such as "tcp" or "tcp,sm,self"; empty lets UCX choose
    net_devices: str = ""  # such as "lo" or "eth0"
    # From this size on D fetches a message instead of buffering it. D must be the one that
    # moves the bytes: a scheme by which P writes would get around the agreement above.
    rendezvous_threshold_bytes: int = 16384

    def for_ucx(self) -> dict[str, str]:
        wanted = {
            "TLS": self.tls,
            "NET_DEVICES": self.net_devices,
            "RNDV_THRESH": str(self.rendezvous_threshold_bytes),
            "RNDV_SCHEME": "get_zcopy",
        }
        return {name: value for name, value in wanted.items() if value and not _is_set(name)}


class UcxxTransport:
    """One UCX context; a worker per pair."""

    name = "ucxx"
    is_one_sided = False
    writes_layers = False  # a message has no room to say which part of a block it is

    def __init__(self, region: Region, config: UcxxConfig = UcxxConfig()) -> None:
        if region.device != "cpu":
            raise InvalidKvSetting(
                f"the ucxx transport moves CPU memory, not {region.device}: use nixl"
            )
        self._ucxx, self._array_type = _import_ucxx()
        self._region = region
        try:
            self._context = self._ucxx.UCXContext(config.for_ucx(), (self._ucxx.Feature.TAG,))
        except self._ucxx.UCXError as error:
            raise PeerUnreachable(f"UCX cannot start: {error!r}") from error

    def open(self) -> UcxxChannel:
        try:
            return UcxxChannel(self._ucxx, self._array_type, self._context, self._region)
        except self._ucxx.UCXError as error:
            raise PeerUnreachable(f"UCX cannot make a worker: {error!r}") from error

    @property
    def ways(self) -> list[str]:
        """What UCX has here, by transport and device: tcp/eth0, cma/memory."""
        return list(dict.fromkeys(_RESOURCE.findall(self._context.info)))

    def close(self) -> None:
        self._context = None


@dataclass(slots=True)
class _Expected:
    """A ticket of D: what has not come, and the receives that are being filled."""

    block_ids: tuple[BlockId, ...]
    num_missing: int
    filling: list[_Receive] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Receive:
    request: Any
    num_blocks: int


class UcxxChannel:
    """One worker, at most one peer."""

    def __init__(self, ucxx: ModuleType, array_type: Any, context: Any, region: Region) -> None:
        self._ucxx = ucxx
        self._array_type = array_type
        self._region = region
        self._worker: Any = ucxx.UCXWorker(context)
        self._metadata: bytes = self._worker.address.tobytes()
        self._endpoint: Any = None
        self._peer_address = b""
        self._peer_region: Region | None = None
        self._sends_by_write: dict[int, list[Any]] = {}
        self._expected: dict[int, _Expected] = {}
        self._binned: list[Any] = []
        self._events: list[ChannelEvent] = []

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """D sends nothing, so the endpoint is made at P's first post."""
        self._peer_address, self._peer_region = metadata, region

    @property
    def close_stops_writes(self) -> bool:
        return True

    def is_peer_gone(self) -> bool:
        return False  # nobody needs to know: closing is enough

    # --- D -----------------------------------------------------------------------------

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._expected[ticket] = _Expected(block_ids, len(block_ids))
        self._end_if_over(ticket)

    def cancel(self, ticket: int) -> None:
        expected = self._expected.get(ticket)
        if expected is None:
            self._events.append(Quieted(ticket))  # all of it had come
            return
        expected.is_cancelled = True
        self._end_if_over(ticket)

    def _take_messages(self) -> None:
        everything = self._ucxx.UCXXTag(0), self._ucxx.UCXXTagMask(0)
        while (message := self._worker.tag_probe(*everything, True)).matched:
            tag = message.sender_tag.value
            ticket, place = tag >> _PLACE_BITS, tag & _PLACE_MASK
            expected = self._expected.get(ticket)
            if expected is None or expected.is_cancelled:
                self._bin(message)
                continue
            target = self._target(expected, place, message.length)
            if target is None:
                self._bin(message)
                self._events.append(Severed(f"a message of {message.length} bytes does not fit"))
                continue
            request = self._worker.tag_recv_with_handle(self._array(target), message)
            num_blocks = target.num_bytes // self._region.block_bytes
            expected.filling.append(_Receive(request, num_blocks))

    def _target(self, expected: _Expected, place: int, num_bytes: int) -> Span | None:
        """Where a message belongs; None if it is not a run of whole, granted blocks."""
        num_blocks, rest = divmod(num_bytes, self._region.block_bytes)
        runs = spans(self._region, expected.block_ids[place : place + num_blocks])
        is_whole = rest == 0 and len(runs) == 1 and runs[0].num_bytes == num_bytes
        return runs[0] if is_whole else None

    def _bin(self, message: Any) -> None:
        buffer = (ctypes.c_char * max(1, message.length))()
        array = self._array_type(memoryview(buffer))
        request = self._worker.tag_recv_with_handle(array, message)
        self._binned.append((request, buffer))

    def _look_at_receives(self) -> None:
        self._binned = [one for one in self._binned if not one[0].completed]
        for ticket in list(self._expected):
            expected = self._expected[ticket]
            ended = [receive for receive in expected.filling if receive.request.completed]
            for receive in ended:
                expected.filling.remove(receive)
                failure = self._failure_of(receive.request)
                if failure is None:
                    expected.num_missing -= receive.num_blocks
                elif not expected.is_cancelled:
                    self._events.append(Severed(f"receive: {failure}"))
            self._end_if_over(ticket)

    def _end_if_over(self, ticket: int) -> None:
        expected = self._expected[ticket]
        if expected.filling:
            return
        if expected.is_cancelled:
            del self._expected[ticket]
            self._events.append(Quieted(ticket))
        elif expected.num_missing == 0:
            del self._expected[ticket]
            self._events.append(Arrived(ticket))

    # --- P -----------------------------------------------------------------------------

    def post(self, write: Write) -> None:
        """A message for each run of blocks that are neighbours on both sides."""
        try:
            endpoint, peer_region = self._connected()
            place, sends = write.first, []
            pairs = pair_spans(self._region, write.sources, peer_region, write.targets)
            for pair in pairs:
                tag = self._ucxx.UCXXTag((write.ticket << _PLACE_BITS) | place)
                array = self._array(Span(pair.source, pair.num_bytes))
                sends.append(endpoint.tag_send(array, tag))
                place += pair.num_bytes // self._region.block_bytes
        except (self._ucxx.UCXError, PeerUnreachable) as error:
            self._events.append(WriteFailed(write.write_id, f"post: {error!r}"))
            return
        self._sends_by_write[write.write_id] = sends

    def notify(self, ticket: int, note: bytes) -> None:
        """D counts what comes and needs no notice."""

    def _connected(self) -> tuple[Any, Region]:
        if self._peer_region is None:
            raise PeerUnreachable("the peer is not known yet")
        if self._endpoint is None:
            address = self._ucxx.UCXAddress.create_from_buffer(self._peer_address)
            self._endpoint = self._ucxx.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        return self._endpoint, self._peer_region

    def _look_at_sends(self) -> None:
        for write_id, sends in list(self._sends_by_write.items()):
            if not all(send.completed for send in sends):
                continue
            del self._sends_by_write[write_id]
            failures = [failure for send in sends if (failure := self._failure_of(send))]
            if failures:
                self._events.append(WriteFailed(write_id, failures[0]))
            else:
                self._events.append(Written(write_id))

    # --- Both --------------------------------------------------------------------------

    def poll(self) -> list[ChannelEvent]:
        self._worker.progress()
        self._take_messages()
        self._look_at_receives()
        self._look_at_sends()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=0, max_attempts=1)
        self._worker.cancel_inflight_requests(period=0, max_attempts=1)
        self._worker.progress()
        self._sends_by_write.clear()
        self._expected.clear()
        self._binned.clear()
        self._endpoint = self._worker = None

    def _failure_of(self, request: Any) -> str | None:
        try:
            request.check_error()
        except self._ucxx.UCXError as error:
            return repr(error)
        return None

    def _array(self, span: Span) -> Any:
        buffer = (ctypes.c_char * span.num_bytes).from_address(span.address)
        return self._array_type(memoryview(buffer))


def _import_ucxx() -> tuple[ModuleType, Any]:
    was_set = _is_set("MEMTYPE_CACHE")
    try:
        import ucxx._lib.libucxx as ucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise TransportMissing(
            "the ucxx transport needs the package ucxx: pip install 'ucxx-cu12==0.52.*'"
        ) from error
    if not was_set:
        # ucxx sets it for the whole process on import, where UCX without CUDA warns of it.
        os.environ.pop("UCX_MEMTYPE_CACHE", None)
    return ucxx, Array


def _is_set(name: str) -> bool:
    return f"UCX_{name}" in os.environ
