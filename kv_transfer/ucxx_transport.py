"""UCXX, two-sided: P sends tagged messages, D receives them. The only module that imports ucxx.

D posts no receive ahead of time, for UCXX cannot take a single one back. It probes for messages
instead, and posts the receive into the granted blocks when one has come and its ticket still
holds; what comes for a cancelled ticket is received into a bin. So nothing lands that D has not
just agreed to, and a cancel ends with the receives that are being filled at that moment.

Bytes move by rendezvous only: P says that it has them, and D fetches them out of P's memory (CMA)
or asks P to send them (TCP). The one thing that arrives unasked is a message of one packet.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from kv_transfer.errors import InvalidKvSetting, PeerUnreachable, TransportMissing
from kv_transfer.messages import Region
from kv_transfer.spans import Span, pair_spans, part_of, spans
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
_OFFSET_BITS = 32  # a tag is the ticket, then where in the grant's bytes the message belongs
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
# Without these D would not be asked, or would be left with half a message when P goes away.
_PROTOCOLS = "^egr/multi/*,rndv/put/*,rndv/send/*"
_MAX_MESSAGE_BYTES = 1 << 20  # unless a block is larger
# Receives under way at a time. An end that closes has to finish those that fetch by CMA, half a
# MiB a look; all else waits with P.
_MAX_RECEIVES = 32
_MAX_ROUNDS = 64  # of receives in one poll
_NUM_LAST_LOOKS = 2000


@dataclass(frozen=True, slots=True)
class UcxxConfig:
    """UCX settings of this transport alone. An UCX_* variable of the environment goes first."""

    tls: str = ""  # such as "tcp" or "tcp,sm,self"; empty lets UCX choose
    net_devices: str = ""  # such as "lo" or "eth0"
    # From this size on a message waits with P until D asks for it. A larger message than a packet
    # of the transport does so at any rate.
    rendezvous_threshold_bytes: int = 8192

    def for_ucx(self) -> dict[str, str]:
        wanted = {
            "TLS": self.tls,
            "NET_DEVICES": self.net_devices,
            "RNDV_THRESH": str(self.rendezvous_threshold_bytes),
            "PROTOS": _PROTOCOLS,
        }
        if not _is_set("RCACHE_ENABLE"):
            # Lets UCX fetch by CMA where a peer's end must be told. What it promises, that no one
            # reads P's memory once P has closed, CMA cannot keep: D may read on, in vain, until
            # it is told. Without the cache UCX 1.21 crashes as it ends a fetch (UCX PR 11714).
            wanted |= {"RCACHE_ENABLE": "y", "CMA_MEMORY_INVALIDATE": "y"}
        return {name: value for name, value in wanted.items() if value and not _is_set(name)}


class UcxxTransport:
    """One UCX context; a worker per pair."""

    name = "ucxx"
    is_one_sided = False

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
    num_missing_bytes: int
    filling: list[_Receive] = field(default_factory=list)
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class _Receive:
    request: Any
    num_bytes: int


class UcxxChannel:
    """One worker, at most one peer."""

    def __init__(self, ucxx: ModuleType, array_type: Any, context: Any, region: Region) -> None:
        self._ucxx = ucxx
        self._array_type = array_type
        self._region = region
        self._worker: Any = ucxx.UCXWorker(context)
        self._metadata: bytes = self._worker.address.tobytes()
        self._endpoint: Any = None
        self._peer_region: Region | None = None
        self._sends_by_write: dict[int, list[Any]] = {}
        self._expected: dict[int, _Expected] = {}
        self._binned: list[Any] = []
        self._events: list[ChannelEvent] = []

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """D sends nothing, but an endpoint is what can be closed by force."""
        if not metadata:
            raise PeerUnreachable("the peer did not say how to reach it")
        try:
            address = self._ucxx.UCXAddress.create_from_buffer(metadata)
            self._endpoint = self._ucxx.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        except self._ucxx.UCXError as error:
            raise PeerUnreachable(f"UCX has no way to the peer: {error!r}") from error
        self._peer_region = region

    @property
    def close_stops_writes(self) -> bool:
        return True

    def is_peer_gone(self) -> bool:
        return False  # nobody needs to know: closing is enough

    # --- D -----------------------------------------------------------------------------

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._expected[ticket] = _Expected(block_ids, len(block_ids) * self._region.block_bytes)
        self._end_if_over(ticket)

    def cancel(self, ticket: int) -> None:
        expected = self._expected.get(ticket)
        if expected is None:
            self._events.append(Quieted(ticket))  # all of it had come
            return
        expected.is_cancelled = True
        self._end_if_over(ticket)

    def _take_messages(self) -> bool:
        """Whether any has come for which there is room."""
        everything = self._ucxx.UCXXTag(0), self._ucxx.UCXXTagMask(0)
        room = _MAX_RECEIVES - len(self._binned)
        room -= sum(len(expected.filling) for expected in self._expected.values())
        for num_taken in range(room):
            message = self._worker.tag_probe(*everything, True)
            if not message.matched:
                return num_taken > 0
            self._take(message)
        return room > 0

    def _take(self, message: Any) -> None:
        tag = message.sender_tag.value
        ticket, offset = tag >> _OFFSET_BITS, (tag & _OFFSET_MASK) * _unit_bytes(self._region)
        expected = self._expected.get(ticket)
        if expected is None or expected.is_cancelled:
            self._bin(message)
            return
        target = self._target(expected, offset, message.length)
        if target is None:
            self._bin(message)
            self._events.append(Severed(f"a message of {message.length} bytes does not fit"))
            return
        request = self._worker.tag_recv_with_handle(self._array(target), message)
        expected.filling.append(_Receive(request, target.num_bytes))

    def _target(self, expected: _Expected, offset: int, num_bytes: int) -> Span | None:
        """Where a message belongs; None if it is no run of granted blocks and no part of one."""
        block_bytes = self._region.block_bytes
        first, within = divmod(offset, block_bytes)
        num_blocks = max(1, num_bytes // block_bytes)
        is_fit = 0 < num_bytes <= num_blocks * block_bytes - within
        runs = spans(self._region, expected.block_ids[first : first + num_blocks])
        if not is_fit or len(runs) != 1 or runs[0].num_bytes != num_blocks * block_bytes:
            return None
        return Span(runs[0].address + within, num_bytes)

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
                    expected.num_missing_bytes -= receive.num_bytes
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
        elif expected.num_missing_bytes == 0:
            del self._expected[ticket]
            self._events.append(Arrived(ticket))

    # --- P -----------------------------------------------------------------------------

    def post(self, write: Write) -> None:
        """A message for each run of bytes that are neighbours on both sides, or some for it."""
        try:
            if self._peer_region is None:
                raise PeerUnreachable("the peer is not known yet")
            unit_bytes, sends = _unit_bytes(self._peer_region), []
            for offset, span in self._messages(write, self._peer_region):
                tag = self._ucxx.UCXXTag((write.ticket << _OFFSET_BITS) | offset // unit_bytes)
                sends.append(self._endpoint.tag_send(self._array(span), tag))
        except (self._ucxx.UCXError, PeerUnreachable) as error:
            self._events.append(WriteFailed(write.write_id, f"post: {error!r}"))
            return
        self._sends_by_write[write.write_id] = sends

    def _messages(self, write: Write, peer_region: Region) -> Iterator[tuple[int, Span]]:
        """What to send, and where in the grant it belongs."""
        block_bytes = self._region.block_bytes
        offset = write.first * block_bytes
        if write.layers is not None:
            part = part_of(block_bytes, write.layers)
            for source in write.sources:
                (block,) = spans(self._region, (source,))
                yield offset + part.start, Span(block.address + part.start, len(part))
                offset += block_bytes
            return
        most = max(1, _MAX_MESSAGE_BYTES // block_bytes) * block_bytes
        for run in pair_spans(self._region, write.sources, peer_region, write.targets):
            for start in range(0, run.num_bytes, most):
                num_bytes = min(most, run.num_bytes - start)
                yield offset, Span(run.source + start, num_bytes)
                offset += num_bytes

    def notify(self, ticket: int, note: bytes) -> None:
        """D counts what comes and needs no notice."""

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
        for _ in range(_MAX_ROUNDS):
            self._worker.progress()
            self._look_at_receives()
            if not self._take_messages():
                break
        self._look_at_sends()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """By force, and before the worker goes.

        UCXX takes what has come from a worker that it destroys, and waits for the rest of it
        without end. Once the path to the peer is closed there is no rest to wait for.
        """
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=0, max_attempts=1)
        for _ in range(_NUM_LAST_LOOKS):
            self._worker.progress_once()
            if all(request.completed for request in self._under_way()):
                break
        self._sends_by_write.clear()
        self._expected.clear()
        self._binned.clear()
        self._endpoint = self._worker = None

    def _under_way(self) -> Iterator[Any]:
        """Requests that hold on to the worker, and the worker to them, until they have ended."""
        for sends in self._sends_by_write.values():
            yield from sends
        for expected in self._expected.values():
            yield from (receive.request for receive in expected.filling)
        yield from (request for request, _ in self._binned)

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


def _unit_bytes(region: Region) -> int:
    """Of the offsets in a grant of this region; layers of odd sizes need less than 4 GiB."""
    return 1 << max(0, (region.num_bytes - 1).bit_length() - _OFFSET_BITS)


def _is_set(name: str) -> bool:
    return f"UCX_{name}" in os.environ
