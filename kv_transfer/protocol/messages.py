"""Messages of the control link between the KV workers of a (D, P) pair.

D is the side that receives KV, P the side that sends it. In a hand-off, D is a decode node and P a
prefill node; any two nodes can be D and P of a pull.
Both send Hello first. The state machines in `kv_transfer/protocol/receiver.py` and
`kv_transfer/protocol/sender.py` define when the others are sent.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from baton.core.ids import BlockId, HandoffId, Incarnation, NodeId
from baton.core.output import FirstToken, TokenLogprobs
from baton.kv_transfer.errors import InvalidMessage, PeerUnreachable
from baton.kv_transfer.layout import KvLayout, is_convertible

# Part of the fingerprint: a node of another version is refused before it can be misunderstood.
WIRE_VERSION = 8
# A transport allocates descriptors in proportion to the number of blocks of the peer.
MAX_REGION_BLOCKS = 1 << 24
MAX_ADDRESS = 1 << 64
MAX_LEASE_S = 3600.0
MAX_NAMES = 1024  # of one pull
MAX_NAME_BYTES = 32
T = TypeVar("T")
DEVICE = re.compile(r"[a-z]+(?::\d{1,3})?")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Properties that must be equal on both sides for a block's bytes to mean the same."""

    model: str  # content hash of the weights and the config
    layout: KvLayout
    wire_version: int = WIRE_VERSION

    def is_convertible_into(self, target: Fingerprint) -> bool:
        """Return whether blocks can be converted into the different ones of `target`."""
        return replace(self, layout=target.layout) == target and is_convertible(
            self.layout, target.layout
        )

    def settings(self) -> dict[str, object]:
        """Return what must be equal, by name, to describe how two nodes differ."""
        layout = {each.name: getattr(self.layout, each.name) for each in fields(self.layout)}
        versions = {"wire_version": self.wire_version, "model": self.model}
        return versions | layout | {"dtype": self.layout.cache_dtype}


@dataclass(frozen=True, slots=True)
class Region:
    """Memory region of KV blocks; block i begins at `base + i * block_bytes`."""

    base: int  # address in the process that owns the region
    num_blocks: int
    block_bytes: int
    device: str = "cpu"  # "cpu", or "cuda:0" and the like

    def __post_init__(self) -> None:
        """Raise InvalidMessage if a value is out of range: regions also come from peers."""
        _check(
            0 < self.num_blocks <= MAX_REGION_BLOCKS, f"invalid number of blocks: {self.num_blocks}"
        )
        _check(self.block_bytes > 0, f"invalid block size: {self.block_bytes} bytes")
        _check(self.base + self.num_bytes <= MAX_ADDRESS, "the region exceeds 64-bit addresses")
        _check(DEVICE.fullmatch(self.device) is not None, f"invalid device: {self.device[:40]!r}")

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Hello:
    """First message on every link, from D and then from P; decides whether the pair fits."""

    node_id: NodeId
    incarnation: Incarnation  # random per process start
    fingerprint: Fingerprint
    region: Region
    transport: str  # "nixl", "ucxx" or "memory"
    metadata: bytes  # connection data of the transport
    staging: Region | None = None  # of D, one block: host memory for blocks that it converts
    moves_device_memory: bool = False  # its transport reads and writes memory of GPUs

    def can_write(self, receiver: Hello) -> bool:
        """Return whether the data path can reach the memory of the receiver's blocks."""
        is_moved = self.moves_device_memory and receiver.moves_device_memory
        return receiver.region.device == "cpu" or is_moved


@dataclass(frozen=True, slots=True)
class Grant:
    """From D: P can write these blocks until the lease ends."""

    handoff_id: HandoffId
    ticket: int  # increases with each grant of a link, so that P detects late and duplicate ones
    first_block: int  # index of block_ids[0] in the sequence's block table
    block_ids: tuple[BlockId, ...]  # in D's region
    lease_s: float  # starts when P receives the message, by P's clock
    names: tuple[bytes, ...] = ()  # of a pull: of the cached blocks that P sends, in order

    def __post_init__(self) -> None:
        _check_lease(self.lease_s)
        if self.names:
            self._check_pull()

    def _check_pull(self) -> None:
        num_names, num_blocks = len(self.names), len(self.block_ids)
        _check(num_names <= MAX_NAMES, f"a pull of {num_names} blocks; the limit is {MAX_NAMES}")
        _check(num_names == num_blocks, f"{num_names} names for {num_blocks} blocks")
        _check(self.first_block == 0, f"a pull from block {self.first_block} on; it begins at 0")
        longest = max(map(len, self.names))
        _check(longest <= MAX_NAME_BYTES, f"a block name of {longest} bytes")


@dataclass(frozen=True, slots=True)
class Renew:
    """From D: extend the leases of these hand-offs. The receiving thread replies with Renewed."""

    handoff_ids: tuple[HandoffId, ...]
    lease_s: float

    def __post_init__(self) -> None:
        _check_lease(self.lease_s)


@dataclass(frozen=True, slots=True)
class Renewed:
    """From P: sign of life; its engine thread has been active recently."""

    handoff_ids: tuple[HandoffId, ...]


@dataclass(frozen=True, slots=True)
class Writing:
    """From P: bytes of this hand-off are in flight or written; D polls more often for a while."""

    handoff_id: HandoffId
    num_written: int = 0  # leading blocks of the grant whose writes have completed on P
    digest: int | None = None  # of these blocks (`protocol/digest.py`)


@dataclass(frozen=True, slots=True)
class RevokeGrant:
    """From D: stop writing. P replies with Revoked once no write can land any more."""

    handoff_id: HandoffId
    ticket: int


@dataclass(frozen=True, slots=True)
class Revoked:
    """From P: no write of this hand-off is in flight, and none will be posted."""

    handoff_id: HandoffId


@dataclass(frozen=True, slots=True)
class Done:
    """From P, once every write has completed: the blocks are complete.

    A one-sided transport delivers it behind the data; otherwise it is sent over the link.
    """

    handoff_id: HandoffId
    num_tokens: int
    first_token: FirstToken | None  # None: a pull
    digest: int | None = None  # of the blocks; None if P does not compute it


@dataclass(frozen=True, slots=True)
class Failed:
    """From P: the hand-off failed. Writes may be in flight; D sends RevokeGrant to fence them."""

    handoff_id: HandoffId
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """From either side, its last message on a link: its end of the data path is destroyed."""

    reason: str


LinkMessage = (
    Hello | Grant | Renew | Renewed | Writing | RevokeGrant | Revoked | Done | Failed | Closed
)


def _check(is_valid: bool, error: str) -> None:
    if not is_valid:
        raise InvalidMessage(error)


def _check_lease(lease_s: float) -> None:
    # False for NaN too, which fails every comparison.
    is_valid = 0 < lease_s <= MAX_LEASE_S
    _check(is_valid, f"a lease of {lease_s} s; it must be above 0 and at most {MAX_LEASE_S:g}")


_ONE_MODEL = "serve one model from all nodes"
_ADVICE = {
    "wire_version": "run one version of baton on all nodes",
    "dtype": "give all nodes one --dtype and --kv-cache-dtype",
    "block_size": "give all nodes one block-size",
    "num_layers": f"{_ONE_MODEL}, with one --speculative: a draft head adds a layer",
}


def find_mismatch(ours: Hello, theirs: Hello, *, is_converted: bool = False) -> str | None:
    """Return the reason why two sides are incompatible, with advice; None if they fit.

    `is_converted`: the receiver converts the sender's blocks, so that they can differ.
    """
    nodes = f"on {ours.node_id} and {theirs.node_id}"
    their_settings = theirs.fingerprint.settings()
    for name, our_value in () if is_converted else ours.fingerprint.settings().items():
        their_value, advice = their_settings[name], _ADVICE.get(name, _ONE_MODEL)
        if our_value != their_value:
            return f"{name} differs: {our_value} and {their_value} {nodes}; {advice}"
    our_bytes, their_bytes = ours.region.block_bytes, theirs.region.block_bytes
    if our_bytes != their_bytes and not is_converted:
        return f"block_bytes differs: {our_bytes} and {their_bytes} {nodes}; {_ONE_MODEL}"
    if ours.transport != theirs.transport:
        transports = f"{ours.transport} and {theirs.transport}"
        return f"transport differs: {transports} {nodes}; give all nodes one --kv-transport"
    return None


def note_of(done: Done) -> bytes:
    """Encode a Done as the notification that a one-sided transport sends behind the data."""
    first = done.first_token
    return json.dumps(
        [
            done.handoff_id.request_id,
            done.handoff_id.attempt,
            done.num_tokens,
            done.digest,
            None if first is None else first.token_id,
            None if first is None else _logprobs_to(first.logprobs),
            "" if first is None else b64encode(first.draft_state).decode(),
        ]
    ).encode()


def decode_done(note: bytes) -> Done:
    """Decode a notification. Raise PeerUnreachable if it is invalid, so that the pair is cut.

    The data path is not authenticated, so every field is checked.
    """
    try:
        request_id, attempt, num_tokens, digest, token_id, logprobs, state = json.loads(note)
        draft_state = b64decode(_check_type(str, state), validate=True)
        return Done(
            HandoffId(_check_type(str, request_id), _check_type(int, attempt)),
            _check_type(int, num_tokens),
            None
            if token_id is None
            else FirstToken(_check_type(int, token_id), _logprobs_of(logprobs), draft_state),
            None if digest is None else _check_type(int, digest),
        )
    except (ValueError, TypeError, RecursionError) as error:
        raise PeerUnreachable(f"the peer's notification cannot be read: {error}") from error


def _logprobs_to(logprobs: TokenLogprobs | None) -> list[Any] | None:
    if logprobs is None:
        return None
    return [logprobs.token_id, logprobs.logprob, logprobs.rank, logprobs.top]


def _logprobs_of(encoded: Any) -> TokenLogprobs | None:
    if encoded is None:
        return None
    token_id, logprob, rank, top = encoded
    pairs = tuple((_check_type(int, token), _check_type(float, value)) for token, value in top)
    return TokenLogprobs(
        _check_type(int, token_id), _check_type(float, logprob), _check_type(int, rank), pairs
    )


def _check_type(kind: type[T], value: Any) -> T:
    # Not isinstance: True is an int, and would pass as a token id.
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
