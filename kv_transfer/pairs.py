"""Registry of the node's pairs: the channel and the Hello of each linked peer.

In a dialled pair this node receives (it is D), in an accepted one it sends (it is P). Each link
has its own channel, opened before Hello and destroyed when the pair is cut. Neither is reused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.errors import PeerUnreachable
from kv_transfer.link import Link, LinkId
from kv_transfer.protocol.messages import Closed, Fingerprint, Hello, Region, find_mismatch
from kv_transfer.transports.base import Channel, Transport
from kv_transfer.types import BlockId, Incarnation, NodeId

# Limit of dialled links without a Hello from the peer. Each has an open channel already.
MAX_LINKS_WITHOUT_HELLO = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this node in its Hello."""

    node_id: NodeId
    incarnation: Incarnation  # random per process start
    fingerprint: Fingerprint


@dataclass(slots=True)
class PeerPair:
    link_id: LinkId
    channel: Channel
    last_message_s: float  # time of the peer's last message, or of dialling
    address: str | None = None  # dialled address; None if accepted
    peer: Hello | None = None

    @property
    def is_dialled(self) -> bool:
        return self.address is not None

    def has_blocks(self, block_ids: tuple[BlockId, ...]) -> bool:
        """Return whether all these blocks are inside the peer's region."""
        return self.peer is not None and max(block_ids, default=-1) < self.peer.region.num_blocks


@dataclass(frozen=True, slots=True)
class CutPair:
    """Pair whose local end is destroyed while the peer's may still exist."""

    link_id: LinkId
    address: str
    node_id: NodeId
    channel: Channel  # closed; `is_peer_gone` remains valid


class Pairs:
    def __init__(
        self, identity: Identity, region: Region, transport: Transport, link: Link
    ) -> None:
        self._identity = identity
        self._region = region
        self._transport = transport
        self._link = link
        self._pairs: dict[LinkId, PeerPair] = {}
        self._link_by_address: dict[str, LinkId] = {}
        self._cut: dict[LinkId, CutPair] = {}
        self.num_cut = 0

    def get(self, link_id: LinkId) -> PeerPair | None:
        return self._pairs.get(link_id)

    def __iter__(self) -> Iterator[PeerPair]:
        return iter(list(self._pairs.values()))

    @property
    def has_cut_pairs(self) -> bool:
        """Return whether blocks are fenced because a cut peer may still write."""
        return bool(self._cut)

    def get_or_dial(self, address: str, now: float) -> LinkId:
        """Return the link to this peer, dialling it if needed. Raise PeerUnreachable."""
        existing = self._link_by_address.get(address)
        if existing is not None:
            return existing
        num_unanswered = sum(pair.peer is None for pair in self._pairs.values())
        if num_unanswered >= MAX_LINKS_WITHOUT_HELLO:
            raise PeerUnreachable(
                f"{num_unanswered} links wait for a Hello from their prefill nodes; limit reached"
            )
        channel = self._transport.open()
        link_id = self._link.dial(address)
        self._pairs[link_id] = PeerPair(link_id, channel, now, address)
        self._link_by_address[address] = link_id
        self._link.send(link_id, self._hello(channel.metadata))
        return link_id

    def complete_dial(self, link_id: LinkId, theirs: Hello) -> PeerPair:
        """Handle the peer's reply to our Hello. Raise PeerUnreachable if incompatible."""
        pair = self._pairs[link_id]
        self._check_compatible(theirs)
        pair.channel.connect(theirs.metadata, theirs.region)
        pair.peer = theirs
        return pair

    def accept(self, link_id: LinkId, theirs: Hello, now: float) -> PeerPair:
        """Connect the data path to a peer that dialled us, and reply. Raise PeerUnreachable.

        The reply confirms that all older pairs with this peer are cut, so the caller must cut
        those (`list_accepted_from`) first.
        """
        try:
            self._check_compatible(theirs)
            channel = self._transport.open()
            channel.connect(theirs.metadata, theirs.region)
        except PeerUnreachable:
            # The peer finds the mismatch itself by comparing our Hello.
            self._link.send(link_id, self._hello(b""))
            raise
        pair = PeerPair(link_id, channel, now, peer=theirs)
        self._pairs[link_id] = pair
        self._link.send(link_id, self._hello(channel.metadata))
        return pair

    def refuse(self, link_id: LinkId, reason: str) -> None:
        """Close a link that never became a pair."""
        self._link.send(link_id, Closed(reason))
        self._link.close(link_id)

    def cut(self, link_id: LinkId, reason: str) -> PeerPair | None:
        """Destroy the local end, then send Closed. The link is not used again."""
        pair = self._pairs.pop(link_id, None)
        if pair is None:
            return None
        self.num_cut += 1
        pair.channel.close()
        self._link.send(link_id, Closed(reason))
        self._link.close(link_id)
        if pair.address is not None:
            del self._link_by_address[pair.address]
            if pair.peer is not None:
                self._cut[link_id] = CutPair(link_id, pair.address, pair.peer.node_id, pair.channel)
        return pair

    def list_accepted_from(self, node_id: NodeId) -> list[PeerPair]:
        return [
            pair
            for pair in self
            if not pair.is_dialled and pair.peer is not None and pair.peer.node_id == node_id
        ]

    def list_unanswered(self, since_s: float) -> list[PeerPair]:
        """Return the pairs without a Hello whose peer has sent nothing since `since_s`."""
        return [pair for pair in self if pair.peer is None and pair.last_message_s <= since_s]

    def list_cut_from(self, node_id: NodeId) -> list[CutPair]:
        return [pair for pair in self._cut.values() if pair.node_id == node_id]

    def list_cut(self) -> list[CutPair]:
        return list(self._cut.values())

    def forget_cut(self, link_id: LinkId) -> None:
        self._cut.pop(link_id, None)

    def _check_compatible(self, theirs: Hello) -> None:
        reason = find_mismatch(self._hello(b""), theirs)
        if reason is not None:
            raise PeerUnreachable(reason)

    def _hello(self, metadata: bytes) -> Hello:
        identity = self._identity
        return Hello(
            identity.node_id,
            identity.incarnation,
            identity.fingerprint,
            self._region,
            self._transport.name,
            metadata,
        )
