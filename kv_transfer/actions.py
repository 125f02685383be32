"""What the two state machines ask the worker half to do, as values."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.link import LinkId
from kv_transfer.messages import LinkMessage
from kv_transfer.transport import Write
from kv_transfer.types import BlockId, Complete, HandoffId


@dataclass(frozen=True, slots=True)
class Say:
    """Send this over the link."""

    link_id: LinkId
    message: LinkMessage


@dataclass(frozen=True, slots=True)
class Break:
    """Give the pair up: destroy our end of the data path and drop the link."""

    link_id: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """D: let the channel know what is going to be written."""

    link_id: LinkId
    ticket: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CancelExpected:
    """D: let the channel know that it is not wanted any more."""

    link_id: LinkId
    ticket: int


@dataclass(frozen=True, slots=True)
class DigestEarly:
    """D: these blocks, which follow those named before, have landed while others are to come."""

    handoff_id: HandoffId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CheckDigest:
    """D: compare the landed bytes with what P says it sent; answer with `checked`.

    The blocks are those that no DigestEarly has named.
    """

    handoff_id: HandoffId
    block_ids: tuple[BlockId, ...]
    digest: int


@dataclass(frozen=True, slots=True)
class Post:
    """P: begin a write."""

    link_id: LinkId
    handoff_id: HandoffId
    write: Write


@dataclass(frozen=True, slots=True)
class AddToDigest:
    """P: these blocks are complete and all of them is posted."""

    link_id: LinkId
    handoff_id: HandoffId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """P: all of it has landed. Notify the ticket, then say Done with the digest."""

    link_id: LinkId
    ticket: int
    complete: Complete


ReceiverAction = Say | Break | Expect | CancelExpected | DigestEarly | CheckDigest
SenderAction = Say | Break | Post | AddToDigest | Announce
PairAction = Say | Expect | CancelExpected | Post | AddToDigest | Announce
