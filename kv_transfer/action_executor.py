"""Executor of the state machines' actions, on links, channels and digests."""

from __future__ import annotations

from kv_transfer.link import Link
from kv_transfer.pairs import Pairs, PeerPair
from kv_transfer.peer_lifecycle import PeerLifecycle
from kv_transfer.poll_interval import PollInterval
from kv_transfer.protocol.actions import (
    BreakLink,
    CancelWrites,
    CheckDigest,
    DigestLanded,
    DigestSent,
    ExpectWrites,
    PairAction,
    PostWrite,
    ReceiverAction,
    SendDone,
    SenderAction,
    SendMessage,
)
from kv_transfer.protocol.digest import Digests
from kv_transfer.protocol.done_message import note_of
from kv_transfer.protocol.messages import Done, Writing
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.sender import Sender
from kv_transfer.records import TransferLedger


class ActionExecutor:
    def __init__(
        self,
        receiver: Receiver,
        sender: Sender,
        pairs: Pairs,
        meetings: PeerLifecycle,
        link: Link,
        digests: Digests,
        ledger: TransferLedger,
        pace: PollInterval,
        *,
        is_one_sided: bool,
    ) -> None:
        self._receiver = receiver
        self._sender = sender
        self._pairs = pairs
        self._peer_lifecycle = meetings
        self._link = link
        self._digests = digests
        self._ledger = ledger
        self._pace = pace
        self._is_one_sided = is_one_sided

    def execute_all(self, now: float) -> None:
        """Execute actions until the state machines request no more."""
        while True:
            actions = [*self._receiver.take_actions(), *self._sender.take_actions()]
            if not actions:
                return
            for action in actions:
                self._perform(action, now)

    def _perform(self, action: ReceiverAction | SenderAction, now: float) -> None:
        if isinstance(action, CheckDigest):
            is_good = self._digests.matches(action.handoff_id, action.block_ids, action.digest)
            self._receiver.checked(action.handoff_id, is_good=is_good)
        elif isinstance(action, DigestLanded):
            self._digests.add_landed(action.handoff_id, action.block_ids)
        elif isinstance(action, BreakLink):
            self._peer_lifecycle.cut(action.link_id, action.reason, now)
        else:
            self._execute_on_pair(action, now)

    def _execute_on_pair(self, action: PairAction, now: float) -> None:
        pair = self._pairs.get(action.link_id)
        if pair is None:
            return  # an earlier action cut the pair
        match action:
            case SendMessage(link_id, message):
                self._link.send(link_id, message)
            case ExpectWrites(_, ticket, block_ids):
                # If P holds computed blocks, they are written before its first Writing arrives.
                self._pace.burst(now)
                pair.channel.expect(ticket, block_ids)
            case CancelWrites(_, ticket):
                pair.channel.cancel(ticket)
            case PostWrite():
                self._post(pair, action, now)
            case DigestSent(_, handoff_id, block_ids):
                self._digests.add_sent(handoff_id, block_ids)
            case SendDone():
                self._announce(pair, action, now)

    def _post(self, pair: PeerPair, post: PostWrite, now: float) -> None:
        self._pace.burst(now)
        peer = pair.peer.node_id if pair.peer is not None else None
        with self._ledger.posting(post.handoff_id, post.write, peer):
            pair.channel.post(post.write)

    def _announce(self, pair: PeerPair, announce: SendDone, now: float) -> None:
        """Send Done. On a one-sided transport it follows the data, and a Writing wakes D."""
        complete = announce.complete
        digest = self._digests.take_sent_digest(complete.handoff_id)
        done = Done(complete.handoff_id, complete.num_tokens, complete.first_token, digest)
        self._pace.linger(now)
        if self._is_one_sided:
            pair.channel.notify(announce.ticket, note_of(done))
            self._link.send(pair.link_id, Writing(complete.handoff_id))
        else:
            self._link.send(pair.link_id, done)
