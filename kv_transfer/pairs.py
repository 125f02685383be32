"""The pairs of a node: for each link to a peer, its channel and what the peer said of itself.

A dialled pair receives (we are D in it), an accepted one sends (we are P). Each link has a
channel of its own, opened before Hello and destroyed when the pair is cut; neither is used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.errors import PeerUnreachable
from kv_transfer.link import Link, LinkId
from kv_transfer.messages import Closed, Fingerprint, Hello, Region, why_refused
from kv_transfer.transport import Channel, Transport
from kv_transfer.types import BlockId, Incarnation, NodeId

# Dialled links that wait for a Hello, each with a data path that is open already.
MAX_UNANSWERED = 32


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this node is to its peers."""

    node_id: NodeId
    incarnation: Incarnation  # random per process start
    fingerprint: Fingerprint


@dataclass(slots=True)
class Pair:
    link_id: LinkId
    channel: Channel
    last_message_s: float  # of the peer, or when we dialled
    address: str | None = None  # where we dialled; None if the peer did
    peer: Hello | None = None

    @property
    def is_dialled(self) -> bool:
        return self.address is not None

    def has_blocks(self, block_ids: tuple[BlockId, ...]) -> bool:
        """Whether the peer's region has all of these."""
        return self.peer is not None and max(block_ids, default=-1) < self.peer.region.num_blocks


@dataclass(frozen=True, slots=True)
class CutPair:
    """A pair whose end here is destroyed, while the peer's may live on."""

    link_id: LinkId
    address: str
    node_id: NodeId
    channel: Channel  # closed, but it can still tell whether the peer lives


class Pairs:
    def __init__(
        self, identity: Identity, region: Region, transport: Transport, link: Link
    ) -> None:
        self._identity = identity
        self._region = region
        self._transport = transport
        self._link = link
        self._pairs: dict[LinkId, Pair] = {}
        self._link_by_address: dict[str, LinkId] = {}
        self._cut: dict[LinkId, CutPair] = {}
        self.num_cut = 0

    def get(self, link_id: LinkId) -> Pair | None:
        return self._pairs.get(link_id)

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self._pairs.values()))

    @property
    def has_cut(self) -> bool:
        """Whether blocks are fenced because of a peer that may still write."""
        return bool(self._cut)

    def dialled(self, address: str, now: float) -> LinkId:
        """The link to this peer; a new one if there is none. Raises PeerUnreachable."""
        known = self._link_by_address.get(address)
        if known is not None:
            return known
        num_unanswered = sum(pair.peer is None for pair in self._pairs.values())
        if num_unanswered >= MAX_UNANSWERED:
            raise PeerUnreachable(
                f"{num_unanswered} links wait for their prefill nodes to answer; no other is made"
            )
        channel = self._transport.open()
        link_id = self._link.dial(address)
        self._pairs[link_id] = Pair(link_id, channel, now, address)
        self._link_by_address[address] = link_id
        self._link.send(link_id, self._hello(channel.metadata))
        return link_id

    def welcome(self, link_id: LinkId, theirs: Hello) -> Pair:
        """The answer to our Hello. Raises PeerUnreachable if the pair may not work together."""
        pair = self._pairs[link_id]
        self._refuse_unless_fit(theirs)
        pair.channel.connect(theirs.metadata, theirs.region)
        pair.peer = theirs
        return pair

    def accept(self, link_id: LinkId, theirs: Hello, now: float) -> Pair:
        """A peer dialled us: connect the data path and answer. Raises PeerUnreachable.

        The answer tells the peer that every older pair of ours with it is cut, so the caller
        cuts those (`accepted_from`) first.
        """
        try:
            self._refuse_unless_fit(theirs)
            channel = self._transport.open()
            channel.connect(theirs.metadata, theirs.region)
        except PeerUnreachable:
            # Our Hello lets the peer see for itself what does not fit.
            self._link.send(link_id, self._hello(b""))
            raise
        pair = Pair(link_id, channel, now, peer=theirs)
        self._pairs[link_id] = pair
        self._link.send(link_id, self._hello(channel.metadata))
        return pair

    def refuse(self, link_id: LinkId, reason: str) -> None:
        """End a link that never became a pair."""
        self._link.send(link_id, Closed(reason))
        self._link.close(link_id)

    def cut(self, link_id: LinkId, reason: str) -> Pair | None:
        """Destroy our end, then say so. The link is not used again."""
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

    def accepted_from(self, node_id: NodeId) -> list[Pair]:
        return [
            pair
            for pair in self
            if not pair.is_dialled and pair.peer is not None and pair.peer.node_id == node_id
        ]

    def unanswered_since(self, last_message_s: float) -> list[Pair]:
        """No Hello has come back, nor any other word since then."""
        return [
            pair for pair in self if pair.peer is None and pair.last_message_s <= last_message_s
        ]

    def cut_from(self, node_id: NodeId) -> list[CutPair]:
        return [pair for pair in self._cut.values() if pair.node_id == node_id]

    def all_cut(self) -> list[CutPair]:
        return list(self._cut.values())

    def forget_cut(self, link_id: LinkId) -> None:
        self._cut.pop(link_id, None)

    def _refuse_unless_fit(self, theirs: Hello) -> None:
        reason = why_refused(self._hello(b""), theirs)
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
