"""Fault injection for KV transfer: a link and a transport that drop, delay, duplicate, reorder
and corrupt messages and writes.

A file per node contains the active fault; without the file there is none.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from baton.core.ids import BlockId
from baton.kv_transfer.link import Link, LinkId
from baton.kv_transfer.protocol.messages import LinkMessage, Region
from baton.kv_transfer.transports.base import Arrived, Channel, ChannelEvent, Transport, Write
from benchmarks.chaos.faults import FaultKind

# Share of messages that DROP and SWAP hit.
SHARE = 0.5
LATE_S = 0.3
ON_LINKS = frozenset({FaultKind.DROP, FaultKind.LATE, FaultKind.DOUBLE, FaultKind.SWAP})
WHOLLY = frozenset({FaultKind.LATE, FaultKind.DOUBLE})


@dataclass(frozen=True, slots=True)
class FaultSwitch:
    """Fault switch of one node: a file with the active fault, and one that counts the hits."""

    path: Path

    @property
    def num_hits(self) -> int:
        with suppress(FileNotFoundError):
            return self._hits.stat().st_size
        return 0

    def hit(self) -> None:
        with self._hits.open("ab") as hits:
            hits.write(b".")

    @property
    def _hits(self) -> Path:
        return self.path.with_suffix(".hits")

    def now(self) -> FaultKind | None:
        with suppress(OSError, ValueError):
            return FaultKind(self.path.read_text(encoding="utf-8"))
        return None

    def turn(self, kind: FaultKind) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(kind.value, encoding="utf-8")
        new.replace(self.path)

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)


class FaultyLink:
    """Link with faults on outgoing messages. Create it on the asyncio loop."""

    def __init__(self, inner: Link, fault_switch: FaultSwitch) -> None:
        self._inner = inner
        self._fault_switch = fault_switch
        self._loop = asyncio.get_running_loop()
        self._draw = random.Random(0)

    def dial(self, address: str) -> LinkId:
        return self._inner.dial(address)

    def close(self, link_id: LinkId) -> None:
        self._inner.close(link_id)

    def send(self, link_id: LinkId, message: LinkMessage) -> None:
        kind = self._fault_switch.now()
        is_hit = self._draw.random() < SHARE
        if kind in ON_LINKS and (is_hit or kind in WHOLLY):
            self._fault_switch.hit()
        if kind is FaultKind.LATE or (kind is FaultKind.SWAP and is_hit):
            self._loop.call_soon_threadsafe(
                self._loop.call_later, LATE_S, self._inner.send, link_id, message
            )
        elif not (kind is FaultKind.DROP and is_hit):
            self._inner.send(link_id, message)
            if kind is FaultKind.DOUBLE:
                self._inner.send(link_id, message)


class FaultyTransport:
    def __init__(self, inner: Transport, region: Region, fault_switch: FaultSwitch) -> None:
        self._inner = inner
        self._region = region
        self._fault_switch = fault_switch

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def is_one_sided(self) -> bool:
        return self._inner.is_one_sided

    @property
    def moves_device_memory(self) -> bool:
        return self._inner.moves_device_memory

    def open(self) -> FaultyChannel:
        return FaultyChannel(self._inner.open(), self._region.num_blocks, self._fault_switch)

    def close(self) -> None:
        self._inner.close()


class FaultyChannel:
    """Channel with faults on outgoing writes and on incoming notifications."""

    def __init__(self, inner: Channel, num_blocks: int, fault_switch: FaultSwitch) -> None:
        self._inner = inner
        self._num_blocks = num_blocks
        self._fault_switch = fault_switch
        self._draw = random.Random(0)
        self._late: list[tuple[float, Arrived]] = []  # with their delivery times

    @property
    def metadata(self) -> bytes:
        return self._inner.metadata

    @property
    def close_stops_writes(self) -> bool:
        return self._inner.close_stops_writes

    def receive_into(self, region: Region) -> None:
        self._inner.receive_into(region)

    def connect(self, metadata: bytes, region: Region) -> None:
        self._inner.connect(metadata, region)

    def is_peer_gone(self) -> bool:
        return self._inner.is_peer_gone()

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._inner.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self._inner.cancel(ticket)

    def post(self, write: Write) -> None:
        if self._fault_switch.now() is FaultKind.CORRUPT:
            # The digest is of the right blocks; the data is that of other blocks.
            others = tuple(BlockId((one + 1) % self._num_blocks) for one in write.sources)
            write = replace(write, sources=others)
            self._fault_switch.hit()
        self._inner.post(write)

    def notify(self, ticket: int, note: bytes) -> None:
        self._inner.notify(ticket, note)

    def poll(self) -> list[ChannelEvent]:
        now = time.monotonic()
        events: list[ChannelEvent] = [one for due_s, one in self._late if due_s <= now]
        self._late = [(due_s, one) for due_s, one in self._late if due_s > now]
        for event in self._inner.poll():
            events += self._deliver(event, now) if isinstance(event, Arrived) else [event]
        return events

    def close(self) -> None:
        self._late.clear()
        self._inner.close()

    def _deliver(self, event: Arrived, now: float) -> Sequence[ChannelEvent]:
        is_hit = self._draw.random() < SHARE
        match self._fault_switch.now():
            case FaultKind.DROP if is_hit:
                return []
            case FaultKind.DOUBLE:
                return [event, event]
            case FaultKind.LATE:
                self._late.append((now + LATE_S, event))
                return []
            case FaultKind.SWAP if is_hit:
                self._late.append((now + LATE_S, event))
                return []
        return [event]
