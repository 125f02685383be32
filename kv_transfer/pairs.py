"""The node's pairs with its peers: dialled, accepted, cut, and redialled to end fences.

In a dialled pair this node receives (it is D), in an accepted one it sends (it is P). Each link
has its own channel, opened before Hello and destroyed when the pair is cut. Neither is reused.
Both state machines are notified in the order that keeps blocks safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from baton.core.ids import BlockId, Incarnation, NodeId
from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.errors import DuplicateNodeId, PeerUnreachable
from baton.kv_transfer.link import Link, LinkId
from baton.kv_transfer.protocol.conversion import Conversion
from baton.kv_transfer.protocol.messages import Closed, Fingerprint, Hello, Region, find_mismatch
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.protocol.sender import Sender
from baton.kv_transfer.transports.base import Channel, Transport

# Limit of dialled links without a Hello from the peer. Each has an open channel already.
MAX_LINKS_WITHOUT_HELLO = 32


@dataclass(frozen=True, slots=True)
class Identity:
    node_id: NodeId
    incarnation: Incarnation  # random per process start
    fingerprint: Fingerprint


@dataclass(slots=True)
class PeerPair:
    link_id: LinkId
    channel: Channel
    last_message_s: float  # time of the peer's last message, or of dialling
    address: str = ""  # dialled address; empty if accepted
    peer: Hello | None = None
    conversion: Conversion | None = None  # by D, if the blocks of the two differ

    @property
    def is_dialled(self) -> bool:
        return bool(self.address)

    @property
    def node_id(self) -> NodeId | None:
        return self.peer.node_id if self.peer is not None else None

    def is_with(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Return whether the peer is this process, and not another one of the same node."""
        peer = self.peer
        return peer is not None and (peer.node_id, peer.incarnation) == (node_id, incarnation)

    def has_blocks(self, block_ids: tuple[BlockId, ...]) -> bool:
        """Return whether all these blocks are inside the peer's region."""
        return self.peer is not None and max(block_ids, default=-1) < self.target.num_blocks

    @property
    def target(self) -> Region:
        """Region on D that P writes."""
        if self.conversion is not None:
            return self.conversion.region
        if self.peer is None:
            raise RuntimeError("the pair is not connected yet")
        return self.peer.region


class Pairs:
    def __init__(
        self,
        identity: Identity,
        region: Region,
        transport: Transport,
        link: Link,
        receiver: Receiver,
        sender: Sender,
        config: KvWorkerConfig,
        staging: Region | None = None,
    ) -> None:
        self._hello = Hello(
            identity.node_id,
            identity.incarnation,
            identity.fingerprint,
            region,
            transport.name,
            metadata=b"",
            staging=staging,
            moves_device_memory=transport.moves_device_memory,
        )
        self._transport = transport
        self._link = link
        self._receiver = receiver
        self._sender = sender
        self._silence_s = config.receiver.silence_s
        self._redial_s = config.redial_s
        self._redialled_s = float("-inf")
        self._pairs: dict[LinkId, PeerPair] = {}
        # Cut pairs whose peer may still write. Their channels are closed; `is_peer_gone` is valid.
        self._fenced: dict[LinkId, PeerPair] = {}
        self.num_cut = 0
        self.num_dropped = 0  # messages of unknown links, and second Hellos

    def get(self, link_id: LinkId) -> PeerPair | None:
        return self._pairs.get(link_id)

    def __iter__(self) -> Iterator[PeerPair]:
        return iter(list(self._pairs.values()))

    def get_or_dial(self, address: str, now: float) -> LinkId:
        """Return the link to this peer, dialling it if needed. Raise PeerUnreachable."""
        for pair in self._pairs.values():
            if pair.address == address:
                return pair.link_id
        num_unanswered = sum(pair.peer is None for pair in self._pairs.values())
        if num_unanswered >= MAX_LINKS_WITHOUT_HELLO:
            raise PeerUnreachable(
                f"{num_unanswered} links wait for a Hello from their peers; limit reached"
            )
        channel = self._transport.open()
        link_id = self._link.dial(address)
        self._pairs[link_id] = PeerPair(link_id, channel, now, address)
        self._link.send(link_id, replace(self._hello, metadata=channel.metadata))
        return link_id

    def handle_hello(self, link_id: LinkId, hello: Hello, now: float) -> None:
        pair = self._pairs.get(link_id)
        if pair is None:
            self._accept(link_id, hello, now)
        elif pair.peer is None:
            self._complete_dial(pair, hello, now)
        else:
            self.num_dropped += 1

    def handle_closed(self, link_id: LinkId, closed: Closed, now: float) -> None:
        self.cut(link_id, f"closed by the peer: {closed.reason}", now)
        self._end_fence(link_id)

    def cut(self, link_id: LinkId, reason: str, now: float) -> None:
        """Cut a pair. The local end is destroyed first, because blocks are released after that."""
        pair = self._pairs.pop(link_id, None)
        if pair is None:
            return
        self.num_cut += 1
        pair.channel.close()
        self._close_link(link_id, reason)
        # Without a Hello no grant was sent, so there are no writes.
        writes_stopped = pair.peer is None or pair.channel.close_stops_writes
        self._receiver.handle_link_cut(link_id, reason, now, writes_stopped=writes_stopped)
        self._sender.handle_link_cut(link_id, reason)
        if self._receiver.has_fenced_blocks(link_id):
            self._fenced[link_id] = pair

    def tick(self, now: float) -> None:
        """Cut links without a Hello, release the blocks of dead peers, and redial cut peers."""
        for pair in self:
            if pair.peer is None and now >= pair.last_message_s + self._silence_s:
                self.cut(pair.link_id, "the peer did not reply to Hello", now)
        for pair in list(self._fenced.values()):
            if pair.channel.is_peer_gone():
                self._end_fence(pair.link_id)
        if self._fenced and now >= self._redialled_s + self._redial_s:
            self._redialled_s = now
            # Their blocks stay fenced until they reply or die. If the local transport cannot open
            # a channel, the next tick tries again.
            with suppress(PeerUnreachable):
                for pair in self._fenced.values():
                    self.get_or_dial(pair.address, now)

    def _accept(self, link_id: LinkId, theirs: Hello, now: float) -> None:
        """Connect the data path to a peer that dialled this node, and reply.

        The reply confirms that all older pairs with this process are cut.
        """
        try:
            self._check_unique(theirs)
        except DuplicateNodeId as error:
            # Without a Hello, whose arrival would end the fences of the other process.
            self._close_link(link_id, str(error))
            return
        for older in self:
            if not older.is_dialled and older.node_id == theirs.node_id:
                self.cut(older.link_id, f"{theirs.node_id} has dialled again", now)
        try:
            conversion = self._find_conversion(theirs, sender=self._hello, receiver=theirs)
            pair = PeerPair(link_id, self._transport.open(), now, "", theirs, conversion)
            pair.channel.connect(theirs.metadata, pair.target)
        except PeerUnreachable as error:
            # The peer finds the mismatch itself by comparing our Hello.
            self._link.send(link_id, self._hello)
            self._close_link(link_id, str(error))
            return
        self._pairs[link_id] = pair
        self._link.send(link_id, replace(self._hello, metadata=pair.channel.metadata))
        self._sender.link_up(link_id)

    def _complete_dial(self, pair: PeerPair, theirs: Hello, now: float) -> None:
        """Connect the data path to a peer that replied to our Hello."""
        # P cut its older ends before it replied. Another process of its node id proves nothing.
        for older in list(self._fenced.values()):
            if older.is_with(theirs.node_id, theirs.incarnation):
                self._end_fence(older.link_id)
        try:
            self._check_unique(theirs)
            conversion = self._find_conversion(theirs, sender=theirs, receiver=self._hello)
            if conversion is not None:
                pair.channel.receive_into(conversion.region)
            pair.channel.connect(theirs.metadata, theirs.region)
        except PeerUnreachable as error:
            self.cut(pair.link_id, str(error), now)
            return
        pair.peer, pair.conversion = theirs, conversion
        self._receiver.link_up(pair.link_id, now, conversion)

    def _end_fence(self, link_id: LinkId) -> None:
        """Release the fenced blocks of a pair whose ends are both destroyed."""
        self._receiver.handle_peer_cut(link_id)
        self._fenced.pop(link_id, None)

    def _close_link(self, link_id: LinkId, reason: str) -> None:
        self._link.send(link_id, Closed(reason))
        self._link.close(link_id)

    def _check_unique(self, theirs: Hello) -> None:
        """Raise DuplicateNodeId while another process of this node id has a pair or a fence."""
        for pair in (*self._pairs.values(), *self._fenced.values()):
            peer = pair.peer
            if peer is None or peer.node_id != theirs.node_id or pair.channel.is_peer_gone():
                continue
            if peer.incarnation != theirs.incarnation:
                raise DuplicateNodeId(
                    f"DuplicateNodeId: two processes have the node id {theirs.node_id}: "
                    f"incarnation {peer.incarnation} is still there, and {theirs.incarnation} "
                    "is refused. End one of them, or set another --node-id"
                )

    def _find_conversion(
        self, theirs: Hello, *, sender: Hello, receiver: Hello
    ) -> Conversion | None:
        """Return the conversion that the pair needs. Raise PeerUnreachable if it does not fit."""
        conversion = Conversion.between(sender, receiver)
        reason = find_mismatch(self._hello, theirs, is_converted=conversion is not None)
        if reason is not None:
            if sender.fingerprint.is_convertible_into(receiver.fingerprint):
                reason += ", or decode nodes more kv-staging-memory"
            raise PeerUnreachable(reason)
        if conversion is None and not sender.can_write(receiver):
            raise PeerUnreachable(
                f"{sender.node_id} cannot write to {receiver.region.device} of "
                f"{receiver.node_id}, whose kv-staging-memory has no room for a block"
            )
        return conversion
