"""The values of a hand-off: who passes which KV blocks to whom.

Every room that speaks of KV blocks takes its words from here. Nothing in this
file knows of torch, gRPC, UCX, clocks or threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

BlockId = NewType("BlockId", int)
NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", str)


@dataclass(frozen=True, slots=True, order=True)
class HandoffId:
    """One try to pass one sequence's KV. The router raises the attempt at each new try."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token that prefill sampled, with its logprobs; it travels beside the KV."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logprob of one chosen token and of the likeliest ones at its position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class Peer:
    """Where the other half of a hand-off can be reached: its control link's address."""

    node_id: NodeId
    address: str  # host:port of its gRPC server


# --- What the scheduler orders, and what the worker half reports. ---------------------
#
# Orders are the scheduler's; they leave with a step's plan and are started before the
# step's forward pass. Reports come back after it. Blocks named in a Receive or a Send are
# held by the hand-off itself, beside whatever request uses them, until the report that
# lets them go.


@dataclass(frozen=True, slots=True)
class Receive:
    """Decode side: let the peer write these blocks. Zero blocks is a full prefix hit."""

    handoff_id: HandoffId
    source: Peer
    first_block: int  # place of block_ids[0] in the sequence's block table
    block_ids: tuple[BlockId, ...]
    num_tokens: int  # tokens of the sequence whose KV will be valid once it landed


@dataclass(frozen=True, slots=True)
class Revoke:
    """Decode side: the blocks of this receive are not wanted any more."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Send:
    """Prefill side: these blocks are computed, in the KV tensor, and will not change."""

    handoff_id: HandoffId
    first_block: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class SendLayers:
    """Prefill side: the coming pass completes these blocks, layer by layer.

    Each layer of them may be written once the pass has ended it. They follow the blocks of all
    Sends before; a Send that begins with them comes after the pass.
    """

    handoff_id: HandoffId
    first_block: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Prefill side: every block was named in a Send; tell the peer when they all landed."""

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Prefill side: nothing more will come for this hand-off."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class KvOrders:
    """What one step asks of the worker half, in the order in which it shall be begun."""

    receives: tuple[Receive, ...] = ()
    revokes: tuple[Revoke, ...] = ()
    sends: tuple[Send, ...] = ()
    completes: tuple[Complete, ...] = ()
    withdraws: tuple[Withdraw, ...] = ()
    layer_sends: tuple[SendLayers, ...] = ()  # of the pass that comes next


@dataclass(frozen=True, slots=True)
class Landed:
    """Every block of a receive is complete and nothing can write to it any more."""

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class Lost:
    """A receive will not complete. Its blocks stay fenced until a release is reported."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class KvReports:
    """What came to pass since the last poll.

    A receive ends in `finished_recving`, or in `failed_recving` (unless it was revoked)
    followed by `released`. A send ends in `finished_sending`, whatever became of it.
    Each is reported exactly once.
    """

    finished_recving: tuple[Landed, ...] = ()
    failed_recving: tuple[Lost, ...] = ()
    released: tuple[HandoffId, ...] = ()  # no write can land any more
    finished_sending: tuple[HandoffId, ...] = ()  # no read is in flight any more
