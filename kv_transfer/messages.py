"""What the two worker halves of a pair say to each other over their control link.

D is the side that receives KV (a decode node), P the side that sends it (a prefill node).
Both say Hello first; the meaning of the others is in the ownership tables of
`kv_transfer/receiver.py` and `kv_transfer/sender.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kv_transfer.errors import InvalidMessage
from kv_transfer.types import BlockId, FirstToken, HandoffId, Incarnation, NodeId

WIRE_VERSION = 2
# What a transport makes of a peer's blocks grows with their number.
MOST_BLOCKS = 1 << 24
END_OF_MEMORY = 1 << 64
LONGEST_LEASE_S = 3600.0
DEVICE = re.compile(r"[a-z]+(?::\d{1,3})?")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal on both sides for a block's bytes to mean the same."""

    model: str  # content hash of the weights and the config
    dtype: str
    layout: str  # order of the axes inside one block
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    wire_version: int = WIRE_VERSION


@dataclass(frozen=True, slots=True)
class Region:
    """Memory that holds blocks: block i is `block_bytes` from `base + i * block_bytes`."""

    base: int  # address in its owner's process
    num_blocks: int
    block_bytes: int
    device: str = "cpu"  # "cpu", or "cuda:0" and the like

    def __post_init__(self) -> None:
        """Raises InvalidMessage: peers tell of theirs."""
        _check(0 < self.num_blocks <= MOST_BLOCKS, f"{self.num_blocks} blocks are no region")
        _check(self.block_bytes > 0, "blocks of no bytes are no region")
        _check(self.base + self.num_bytes <= END_OF_MEMORY, "no memory is as large as the region")
        _check(DEVICE.fullmatch(self.device) is not None, f"no device is {self.device[:40]!r}")

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every link, from D and then from P: the pair may work together, or may not."""

    node_id: NodeId
    incarnation: Incarnation  # random per process start
    fingerprint: Fingerprint
    region: Region
    transport: str  # "nixl", "ucxx" or "memory"
    metadata: bytes  # what the transport needs in order to reach this side


@dataclass(frozen=True, slots=True)
class Grant:
    """From D: these blocks are yours to write until the lease ends."""

    handoff_id: HandoffId
    ticket: int  # rises with each grant of a link: a late or doubled one is known by it
    first_block: int  # place of block_ids[0] in the sequence's block table
    block_ids: tuple[BlockId, ...]  # in D's region
    lease_s: float  # counted on P's clock from when it hears of it

    def __post_init__(self) -> None:
        _check_lease(self.lease_s)


@dataclass(frozen=True, slots=True)
class Renew:
    """From D: these are still wanted. P answers with Renewed, at once, on whatever thread hears."""

    handoff_ids: tuple[HandoffId, ...]
    lease_s: float

    def __post_init__(self) -> None:
        _check_lease(self.lease_s)


@dataclass(frozen=True, slots=True)
class Renewed:
    """From P: it lives, and its engine has not been away for too long."""

    handoff_ids: tuple[HandoffId, ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """From P: bytes of this hand-off are on their way, or have come; D polls often for a while."""

    handoff_id: HandoffId
    num_written: int = 0  # of the grant's blocks, from its first on: P has seen them written


@dataclass(frozen=True, slots=True)
class RevokeGrant:
    """From D: stop; answer when no write can land any more."""

    handoff_id: HandoffId
    ticket: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """From P: nothing of mine is in flight for it, and nothing will be posted again."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Done:
    """From P, when every write is known to have landed: the blocks are complete.

    A one-sided transport carries it behind the data; otherwise it goes over the link.
    """

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken
    digest: int | None = None  # xxh3-64 of the blocks in order; None where P does not compute it


@dataclass(frozen=True, slots=True)
class Failed:
    """From P: will not come. A write may still be in flight; D revokes to learn when not."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """From either side, its last word on a link: my end of the data path is destroyed."""

    reason: str


LinkMessage = (
    Hello | Grant | Renew | Renewed | Writing | RevokeGrant | Revoked | Done | Failed | Closed
)


def _check(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise InvalidMessage(otherwise)


def _check_lease(lease_s: float) -> None:
    # NaN fails every comparison, so it lands here too.
    is_lease = 0 < lease_s <= LONGEST_LEASE_S
    _check(is_lease, f"a lease of {lease_s} s; it must be above 0 and at most {LONGEST_LEASE_S:g}")


_ONE_VERSION = "run one version of baton on all nodes"
_ONE_MODEL = "serve one model from all nodes"
_ADVICE = {
    "wire_version": _ONE_VERSION,
    "model": _ONE_MODEL,
    "dtype": "give all nodes one --dtype",
    "layout": _ONE_VERSION,
    "block_size": "give all nodes one --block-size",
    "num_layers": _ONE_MODEL,
    "num_kv_heads": _ONE_MODEL,
    "head_dim": _ONE_MODEL,
}


def why_refused(ours: Hello, theirs: Hello) -> str | None:
    """What keeps two sides from working together, and what to do; None if nothing does."""
    places = f"on {ours.node_id} and {theirs.node_id}"
    for name, advice in _ADVICE.items():
        mine, other = getattr(ours.fingerprint, name), getattr(theirs.fingerprint, name)
        if mine != other:
            return f"{name} differs: {mine} and {other} {places}; {advice}"
    mine, other = ours.region.block_bytes, theirs.region.block_bytes
    if mine != other:
        return f"block_bytes differs: {mine} and {other} {places}; {_ONE_MODEL}"
    if ours.transport != theirs.transport:
        which = f"{ours.transport} and {theirs.transport}"
        return f"transport differs: {which} {places}; give all nodes one --kv-transport"
    return None
