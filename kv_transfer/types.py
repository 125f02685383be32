"""Orders of the scheduler and reports of the KV worker, as values: one of each in a step."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from baton.core.ids import BlockId, BlockName, HandoffId, Peer
from baton.core.output import FirstToken
from baton.kv_transfer.external_kv import (
    NO_EXTERNAL_REPORTS,
    NO_ORDERS,
    ExternalOrders,
    ExternalReports,
    Load,
    Store,
    Use,
)
from baton.kv_transfer.foreign_kv import ForeignOrder, ForeignPulled

# Orders are part of a step's plan and start before its forward pass; reports return after it.
# The hand-off holds its own reference on every block named in a Receive or a Send, in addition
# to that of the request, until the report that releases it.


@dataclass(frozen=True, slots=True)
class Receive:
    """Receiving side: grant these blocks to the peer. No blocks: the whole prefix is cached.

    With `names`, it is a pull: the peer sends the cached blocks of these names, one for each block.
    """

    handoff_id: HandoffId
    source: Peer
    first_block: int  # place of block_ids[0] in the order of the hand-off
    block_ids: tuple[BlockId, ...]
    num_tokens: int  # tokens of the sequence whose KV is valid once the blocks have landed
    num_cached_tokens: int = 0  # leading tokens whose KV was there before
    names: tuple[bytes, ...] = ()
    request_id: str = ""  # of the request that waits for a pull, for its trace


@dataclass(frozen=True, slots=True)
class Send:
    """Sending side: send these blocks, which follow those of all earlier Sends."""

    handoff_id: HandoffId
    first_block: int
    block_ids: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Sending side: all blocks have been ordered by Sends. Notify the peer once all are written."""

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken | None  # None: a pull


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Sending side: abandon the send; no further blocks follow."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class KvOrders:
    """KV transfer orders of one step, in the order in which they are started."""

    receives: tuple[Receive, ...] = ()
    revokes: tuple[HandoffId, ...] = ()  # of receives: take their blocks back
    sends: tuple[Send, ...] = ()  # of blocks whose KV is computed and final
    completes: tuple[Complete, ...] = ()
    withdraws: tuple[Withdraw, ...] = ()
    # Of blocks that the next forward pass computes: a layer can be sent as soon as it is computed.
    # After the pass, a Send that begins with the same blocks is ordered.
    layer_sends: tuple[Send, ...] = ()
    external: ExternalOrders = NO_ORDERS  # of a KV cache outside the engine
    foreign: tuple[ForeignOrder, ...] = ()  # of servers that are not Baton's


NO_KV_ORDERS = KvOrders()


@dataclass(slots=True)
class StepOrders:
    """Orders that are collected while a step is planned."""

    receives: list[Receive] = field(default_factory=list)
    revokes: list[HandoffId] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    completes: list[Complete] = field(default_factory=list)
    withdraws: list[Withdraw] = field(default_factory=list)
    layer_sends: list[Send] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    drops: list[BlockName] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    foreign: list[ForeignOrder] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def take(self) -> KvOrders:
        """Return and clear the orders."""
        if not self:
            return NO_KV_ORDERS
        taken: dict[str, Any] = {}
        for name in self.__slots__:
            taken[name] = tuple(getattr(self, name))
            getattr(self, name).clear()
        external = {name: taken.pop(name) for name in ("loads", "stores", "drops", "uses")}
        return KvOrders(**taken, external=ExternalOrders(**external))


@dataclass(frozen=True, slots=True)
class Landed:
    """Receive completed: every block is valid, and no write can reach it any more."""

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken | None  # None: a pull


@dataclass(frozen=True, slots=True)
class Lost:
    """Receive failed. Its blocks stay fenced until their release is reported."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class Proved:
    """The first blocks of a receive that has failed, or was revoked, are valid nevertheless.

    No write can reach them any more, although they are released only with the others.
    """

    handoff_id: HandoffId
    num_blocks: int


# Reasons of refused pulls, which are no failures.
NOT_CACHED = "the blocks are not all cached"
TOO_MANY_PULLS = "too many blocks are being pulled"


@dataclass(frozen=True, slots=True)
class Requested:
    """A peer pulls the cached blocks of these names and has granted blocks for them.

    The scheduler orders a Send of all of them and a Complete, or a Withdraw.
    """

    handoff_id: HandoffId
    names: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class KvReports:
    """Events since the last poll.

    A receive ends with `finished_recving`, or with `failed_recving` (omitted if it was revoked)
    followed by `released`. A send ends with `finished_sending`, successful or not.
    Each event is reported exactly once.
    """

    finished_recving: tuple[Landed, ...] = ()
    failed_recving: tuple[Lost, ...] = ()
    proved: tuple[Proved, ...] = ()
    released: tuple[HandoffId, ...] = ()  # no write can land in their blocks any more
    finished_sending: tuple[HandoffId, ...] = ()  # no read of their source blocks is in flight
    requested: tuple[Requested, ...] = ()  # pulls by peers
    granted: tuple[HandoffId, ...] = ()  # hand-offs, computed or not, whose peer holds blocks ready
    external: ExternalReports = NO_EXTERNAL_REPORTS  # of a KV cache outside the engine
    foreign: tuple[ForeignPulled, ...] = ()

    def joined(self, other: KvReports) -> KvReports:
        """Return both reports as one. They are of different drivers."""
        if self is NO_REPORTS or other == NO_REPORTS:
            return other if self is NO_REPORTS else self
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        changed = {name: value for name, value in own.items() if value != getattr(NO_REPORTS, name)}
        return replace(other, **changed)


NO_REPORTS = KvReports()
