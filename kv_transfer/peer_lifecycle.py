"""Life cycle of peer links: Hello, cut and redial.

Notifies both state machines in the order that keeps blocks safe.
"""

from __future__ import annotations

from kv_transfer.errors import PeerUnreachable
from kv_transfer.link import LinkId
from kv_transfer.pairs import Pairs
from kv_transfer.protocol.messages import Closed, Hello
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.sender import Sender


class PeerLifecycle:
    def __init__(self, pairs: Pairs, receiver: Receiver, sender: Sender, redial_s: float) -> None:
        self._pairs = pairs
        self._receiver = receiver
        self._sender = sender
        self._redial_s = redial_s
        self._redialled_s = float("-inf")
        self.num_dropped = 0

    def handle_hello(self, link_id: LinkId, hello: Hello, now: float) -> None:
        pair = self._pairs.get(link_id)
        try:
            if pair is None:
                self._accept(link_id, hello, now)
            elif pair.peer is None:
                self._complete_dial(link_id, hello, now)
            else:
                self.num_dropped += 1
        except PeerUnreachable as error:
            if pair is None:
                self._pairs.refuse(link_id, str(error))
            self.cut(link_id, str(error), now)

    def handle_closed(self, link_id: LinkId, closed: Closed, now: float) -> None:
        self.cut(link_id, f"closed by the peer: {closed.reason}", now)
        self._end_fences_of(link_id)

    def cut(self, link_id: LinkId, reason: str, now: float) -> None:
        """Cut a pair. The local end is destroyed first, because blocks are released after that."""
        pair = self._pairs.cut(link_id, reason)
        if pair is None:
            return
        # Without a Hello no grant was sent, so there are no writes.
        writes_stopped = pair.peer is None or pair.channel.close_stops_writes
        self._receiver.handle_link_cut(link_id, reason, now, writes_stopped=writes_stopped)
        self._sender.handle_link_cut(link_id, reason)
        if not self._receiver.has_fenced_blocks(link_id):
            self._pairs.forget_cut(link_id)

    def tick(self, now: float, silence_s: float) -> None:
        """Cut links without a Hello, release the blocks of dead peers, and redial cut peers."""
        for pair in self._pairs.list_unanswered(now - silence_s):
            self.cut(pair.link_id, "the prefill node did not reply to Hello", now)
        for cut in self._pairs.list_cut():
            if cut.channel.is_peer_gone():
                self._end_fences_of(cut.link_id)
        if self._pairs.has_cut_pairs and now >= self._redialled_s + self._redial_s:
            self._redialled_s = now
            self._redial(now)

    def _accept(self, link_id: LinkId, hello: Hello, now: float) -> None:
        for older in self._pairs.list_accepted_from(hello.node_id):
            self.cut(older.link_id, f"{hello.node_id} has dialled again", now)
        self._pairs.accept(link_id, hello, now)
        self._sender.link_up(link_id)

    def _complete_dial(self, link_id: LinkId, hello: Hello, now: float) -> None:
        # P cut its older ends before it replied, or it is a new process.
        for older in self._pairs.list_cut_from(hello.node_id):
            self._end_fences_of(older.link_id)
        self._pairs.complete_dial(link_id, hello)
        self._receiver.link_up(link_id, now)

    def _end_fences_of(self, link_id: LinkId) -> None:
        """Release the fenced blocks of a pair whose ends are both destroyed."""
        self._receiver.handle_peer_cut(link_id)
        self._pairs.forget_cut(link_id)

    def _redial(self, now: float) -> None:
        """Dial all cut peers. Their blocks stay fenced until they reply or die."""
        for cut in self._pairs.list_cut():
            try:
                self._pairs.get_or_dial(cut.address, now)
            except PeerUnreachable:
                return  # the local transport cannot open a channel; the next tick tries again
