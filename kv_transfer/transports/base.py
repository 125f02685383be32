"""Transport interface of the KV worker: two Protocols and their events.

A channel is one end of the data path of one (D, P) pair and lives as long as their link.
Each pair has its own channel, so that closing it disconnects one peer only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region


@dataclass(frozen=True, slots=True)
class UcxConfig:
    """UCX settings of a transport. UCX_* environment variables take precedence."""

    # UCX transports, such as "tcp" or "^cma"; empty lets UCX choose. Between processes on one
    # machine it chooses CMA: fast, but the fenced blocks of a stalled P stay fenced over NIXL until
    # P replies or dies. Without CMA, D releases them by closing its own end.
    tls: str = ""
    net_devices: str = ""  # such as "lo" or "eth0"; empty lets UCX choose


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Layers `first` to `end` of a block of `of` layers, which are contiguous and of equal size."""

    first: int
    end: int  # exclusive
    of: int

    @property
    def is_whole(self) -> bool:
        return self.end - self.first == self.of

    def byte_range(self, block_bytes: int) -> range:
        layer_bytes = block_bytes // self.of
        return range(self.first * layer_bytes, self.end * layer_bytes)

    def places(self, block_ids: Sequence[BlockId]) -> npt.NDArray[np.int64]:
        """Return the places of these layers of blocks, each of which takes `of` places."""
        within = np.arange(self.first, self.end)
        return (np.array(block_ids)[:, None] * self.of + within).ravel()


WHOLE_BLOCK = LayerRange(0, 1, 1)


@dataclass(frozen=True, slots=True)
class Write:
    """Copy of blocks, or of some of their layers, from P's region into D's, for one grant."""

    write_id: int  # chosen by the caller, unique in its channel
    ticket: int  # of the grant
    first: int  # index of the first block in the grant
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]  # same length as `sources`
    layers: LayerRange = WHOLE_BLOCK


@dataclass(frozen=True, slots=True)
class Written:
    """On P: the source is not read any more. One-sided: all bytes are in D's memory as well."""

    write_id: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """On P: the write failed. Parts of it may have landed, or may land later."""

    write_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """On D: all data of this ticket has landed."""

    ticket: int
    note: bytes = b""  # one-sided: payload of P's notification


@dataclass(frozen=True, slots=True)
class BlocksLanded:
    """On D, two-sided only: the first `num_blocks` blocks of this ticket are complete."""

    ticket: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CancelCompleted:
    """On D, two-sided only: the ticket is cancelled, and no posted receive of it can write."""

    ticket: int


@dataclass(frozen=True, slots=True)
class ChannelBroken:
    """The data path is broken. Writes in flight can still land."""

    reason: str


ChannelEvent = Written | WriteFailed | Arrived | BlocksLanded | CancelCompleted | ChannelBroken


class Channel(Protocol):
    """One end of a pair's data path. Calls do not block; bytes move only inside `poll`."""

    @property
    def metadata(self) -> bytes:
        """Connection data for the other end."""
        ...

    def connect(self, metadata: bytes, region: Region) -> None:
        """Set the other end and its region. Called on both sides. Raise PeerUnreachable."""
        ...

    def receive_into(self, region: Region) -> None:
        """On D, before `connect`: take blocks in this part of the staging region instead."""
        ...

    @property
    def close_stops_writes(self) -> bool:
        """On D, once connected: return whether closing this end stops all writes of P.

        False where P accesses D's memory directly (CMA, XPMEM, CUDA IPC). There, writes end only
        when P confirms it or dies.
        """
        ...

    def is_peer_gone(self) -> bool:
        """On D: return whether the peer's process is known to be dead. Valid after `close` too."""
        ...

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        """On D: accept writes to these blocks under this ticket."""
        ...

    def cancel(self, ticket: int) -> None:
        """On D: cancel a ticket. Two-sided: reports CancelCompleted once. One-sided: no-op."""
        ...

    def post(self, write: Write) -> None:
        """On P: begin a write. It ends with exactly one Written or WriteFailed."""
        ...

    def notify(self, ticket: int, note: bytes) -> None:
        """On P, one-sided: send D its Arrived, once all writes of the ticket are Written."""
        ...

    def poll(self) -> list[ChannelEvent]:
        """Make progress and return events. Both ends must poll while writes are in flight."""
        ...

    def close(self) -> None:
        """Destroy this end. On P, no further write begins and no source memory is read any more."""
        ...


class Transport(Protocol):
    """Factory of channels over one registered region."""

    @property
    def name(self) -> str: ...

    @property
    def is_one_sided(self) -> bool:
        """Return whether P writes directly, rather than sending into receives posted by D."""
        ...

    @property
    def moves_device_memory(self) -> bool:
        """Return whether it reads and writes memory of GPUs, here and on a peer that does, too."""
        ...

    def open(self) -> Channel: ...

    def close(self) -> None: ...
