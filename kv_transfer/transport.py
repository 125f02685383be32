"""What moves the bytes, as the worker half sees it: two Protocols and their events.

A channel is one end of the data path of one (D, P) pair and lives as long as their link.
Each pair has its own, so that closing it cuts off one peer and nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kv_transfer.messages import Region
from kv_transfer.types import BlockId


@dataclass(frozen=True, slots=True)
class LayerRange:
    """Some layers of a block that holds `of` of them, one after the other, all of one size."""

    first: int
    end: int  # the first that is not meant
    of: int


@dataclass(frozen=True, slots=True)
class Write:
    """Blocks, or some layers of them, to copy from P's region into D's, for one grant."""

    write_id: int  # chosen by the caller, unique in its channel
    ticket: int  # the grant's
    first: int  # place of the first block among the blocks of the grant
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]  # as many
    layers: LayerRange | None = None  # None: whole blocks


@dataclass(frozen=True, slots=True)
class Written:
    """On P: the source is not read any more; one-sided, every byte is in D's memory too."""

    write_id: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """On P: part of the write may have landed, and part may still land later."""

    write_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Arrived:
    """On D: all that P wrote under this ticket has landed."""

    ticket: int
    note: bytes = b""  # one-sided: what P said with it


@dataclass(frozen=True, slots=True)
class Landing:
    """On D, two-sided only: so many blocks of this ticket, from its first on, are complete."""

    ticket: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Quieted:
    """On D, two-sided only: no posted receive of this ticket can write any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Severed:
    """The data path is broken. Writes in flight may or may not land."""

    reason: str


ChannelEvent = Written | WriteFailed | Arrived | Landing | Quieted | Severed


class Channel(Protocol):
    """One end of a pair's data path. Nothing blocks; nothing moves unless polled."""

    @property
    def metadata(self) -> bytes:
        """What the other end needs in order to connect."""
        ...

    def connect(self, metadata: bytes, region: Region) -> None:
        """Learn of the other end and its memory, on both sides. Raises PeerUnreachable."""
        ...

    @property
    def close_stops_writes(self) -> bool:
        """On D, once connected: when this end is closed nothing lands, whatever is still sent.

        False where P can reach into D's memory by itself (CMA, XPMEM, CUDA IPC): then only P's
        word, or its death, ends it.
        """
        ...

    def is_peer_gone(self) -> bool:
        """On D: the other end's process is known to be dead. May be asked after `close`."""
        ...

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        """On D: these blocks will be written under this ticket."""
        ...

    def cancel(self, ticket: int) -> None:
        """On D: no more. A two-sided transport answers with Quieted, once; others never."""
        ...

    def post(self, write: Write) -> None:
        """On P: begin a write; ends in Written or WriteFailed, once."""
        ...

    def notify(self, ticket: int, note: bytes) -> None:
        """On P, one-sided, when every write of the ticket is Written: let D have its Arrived."""
        ...

    def poll(self) -> list[ChannelEvent]:
        """Move bytes, and tell what ended. Both ends must poll while anything is in flight."""
        ...

    def close(self) -> None:
        """Destroy this end. On P: no write is begun, and nothing is used that is still read."""
        ...


class Transport(Protocol):
    """Makes channels over one registered region."""

    @property
    def name(self) -> str: ...

    @property
    def is_one_sided(self) -> bool:
        """P writes where it wants; else P sends into receives that D has posted."""
        ...

    def open(self) -> Channel: ...

    def close(self) -> None: ...
