"""Actions that the sender and receiver state machines request from the KV worker, as values.

P is the prefill (sending) side, D the decode (receiving) side.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.conversion import StagedBlocks
from baton.kv_transfer.protocol.messages import LinkMessage
from baton.kv_transfer.transports.base import Write
from baton.kv_transfer.types import Complete


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a control message over the link."""

    link_id: LinkId
    message: LinkMessage


@dataclass(frozen=True, slots=True)
class BreakLink:
    """Abandon the pair: destroy the local end of the data path and close the link."""

    link_id: LinkId
    reason: str


@dataclass(frozen=True, slots=True)
class ExpectWrites:
    """D: register the blocks of a grant with the channel."""

    link_id: LinkId
    ticket: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """D: cancel the receives of a ticket in the channel."""

    link_id: LinkId
    ticket: int


@dataclass(frozen=True, slots=True)
class DigestBlocks:
    """Add blocks to the digest of a hand-off, after those of its earlier DigestBlocks.

    D: they have landed, while others are in flight. P: they are computed and posted.
    """

    handoff_id: HandoffId
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class CheckDigest:
    """D: compare the digest of the landed bytes with P's. The result goes to `checked`.

    `block_ids` holds only the blocks not yet covered by a DigestBlocks.
    """

    handoff_id: HandoffId
    block_ids: tuple[BlockId, ...]
    digest: int


@dataclass(frozen=True, slots=True)
class ProveBlocks:
    """D: compare the digest of the blocks so far with P's. If it matches, `proved` follows."""

    handoff_id: HandoffId
    num_blocks: int
    digest: int


@dataclass(frozen=True, slots=True)
class ConvertStaged:
    """D: convert landed blocks of the staging area into those of the order; then `converted`."""

    staged: StagedBlocks


@dataclass(frozen=True, slots=True)
class PostWrite:
    """P: post a write to the channel."""

    link_id: LinkId
    handoff_id: HandoffId
    write: Write


@dataclass(frozen=True, slots=True)
class SendDone:
    """P: all writes have completed. Send Done with the digest, behind the data if one-sided."""

    link_id: LinkId
    ticket: int
    complete: Complete


PairAction = SendMessage | ExpectWrites | CancelWrites | PostWrite | SendDone
Action = PairAction | BreakLink | DigestBlocks | CheckDigest | ProveBlocks | ConvertStaged
