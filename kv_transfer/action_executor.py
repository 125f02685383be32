"""Executor of the state machines' actions, on links, channels and digests; the polling interval."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.core.ids import HandoffId
from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.link import Link
from baton.kv_transfer.pairs import Pairs, PeerPair
from baton.kv_transfer.protocol.actions import (
    Action,
    BreakLink,
    CancelWrites,
    CheckDigest,
    ConvertStaged,
    DigestBlocks,
    ExpectWrites,
    PairAction,
    PostWrite,
    ProveBlocks,
    SendDone,
    SendMessage,
)
from baton.kv_transfer.protocol.conversion import StagedBlocks, StagingArea
from baton.kv_transfer.protocol.digest import Digests
from baton.kv_transfer.protocol.incoming import IncomingState
from baton.kv_transfer.protocol.messages import Done, Writing, note_of
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.protocol.sender import Sender
from baton.kv_transfer.records import TransferLedger


class PollInterval:
    """Polling interval of the KV worker. Pure: the time is an argument."""

    def __init__(self, config: KvWorkerConfig, receiver: Receiver, sender: Sender) -> None:
        self._config = config
        self._receiver = receiver
        self._sender = sender
        self._bursts_until_s = self._lingers_until_s = self._ticked_s = float("-inf")

    def burst(self, now: float) -> None:
        """Poll at the burst interval for `burst_s`: a transfer has begun or is about to."""
        self._bursts_until_s = now + self._config.burst_s

    def linger(self, now: float) -> None:
        """Keep polling for `linger_s`, to flush the last message of a hand-off."""
        self._lingers_until_s = now + self._config.linger_s

    def is_tick_due(self, now: float) -> bool:
        """Return True once per `tick_s`, when deadlines must be checked."""
        if now < self._ticked_s + self._config.tick_s:
            return False
        self._ticked_s = now
        return True

    def next_poll_s(self, now: float) -> float | None:
        """Return the delay until the next poll; None: only after the next message."""
        incoming = list(self._receiver.incoming())
        is_granted = any(one.state is not IncomingState.WAITING for one in incoming)
        if now < self._bursts_until_s and (is_granted or self._sender.has_flights):
            return self._config.burst_poll_s
        is_writing = self._sender.has_flights or any(one.is_writing for one in incoming)
        if is_writing or now < self._lingers_until_s:
            return self._config.poll_s
        if is_granted:
            return self._config.idle_poll_s
        return self._config.tick_s if incoming or self._sender.has_sends else None


@dataclass(slots=True, eq=False)
class ActionExecutor:
    receiver: Receiver
    sender: Sender
    pairs: Pairs
    link: Link
    digests: Digests
    ledger: TransferLedger
    poll_interval: PollInterval
    is_one_sided: bool
    staging: StagingArea | None = None
    _converting: list[tuple[HandoffId, Fence]] = field(default_factory=list, init=False)

    def execute_all(self, now: float) -> None:
        """Execute actions until the state machines request no more."""
        while True:
            self._report_converted()
            actions = [*self.receiver.take_actions(), *self.sender.take_actions()]
            if not actions:
                return
            for action in actions:
                self._execute(action, now)

    def _execute(self, action: Action, now: float) -> None:
        match action:
            case CheckDigest(handoff_id, block_ids, digest):
                is_good = self.digests.matches(handoff_id, block_ids, digest)
                self.receiver.checked(handoff_id, is_good=is_good)
            case DigestBlocks(handoff_id, block_ids):
                self.digests.add(handoff_id, block_ids)
            case ProveBlocks(handoff_id, num_blocks, digest):
                if self.digests.value_after(handoff_id, num_blocks) == digest:
                    self.receiver.proved(handoff_id, num_blocks)
            case ConvertStaged(staged):
                self._convert(staged, now)
            case BreakLink(link_id, reason):
                self.pairs.cut(link_id, reason, now)
            case _:
                pair = self.pairs.get(action.link_id)
                if pair is not None:  # else an earlier action cut the pair
                    self._execute_on_pair(pair, action, now)

    def _execute_on_pair(self, pair: PeerPair, action: PairAction, now: float) -> None:
        match action:
            case SendMessage(link_id, Writing() as writing):
                digest = self.digests.value_after(writing.handoff_id, writing.num_written)
                self.link.send(link_id, replace(writing, digest=digest))
            case SendMessage(link_id, message):
                self.link.send(link_id, message)
            case ExpectWrites(_, ticket, block_ids):
                # If P holds computed blocks, they are written before its first Writing arrives.
                self.poll_interval.burst(now)
                pair.channel.expect(ticket, block_ids)
            case CancelWrites(_, ticket):
                pair.channel.cancel(ticket)
            case PostWrite(_, handoff_id, write):
                self.poll_interval.burst(now)
                self.ledger.note_post(handoff_id, write, pair.node_id)
                pair.channel.post(write)
            case SendDone():
                self._announce(pair, action, now)

    def _convert(self, staged: StagedBlocks, now: float) -> None:
        handoff_id = staged.order.handoff_id
        if self.staging is not None and self.receiver.awaits_conversion(handoff_id):
            self.ledger.note_staged(handoff_id, staged)
            self._converting.append((handoff_id, self.staging.convert(staged)))
            self.poll_interval.burst(now)

    def _report_converted(self) -> None:
        """Report receives whose conversion is done.

        Those that have ended meanwhile are waited for: their blocks are about to be reused.
        """
        for handoff_id, fence in list(self._converting):
            is_awaited = self.receiver.awaits_conversion(handoff_id)
            if not is_awaited:
                fence.wait()
            elif not fence.is_passed:
                continue
            self._converting.remove((handoff_id, fence))
            if is_awaited:
                self.receiver.converted(handoff_id)

    def _announce(self, pair: PeerPair, announce: SendDone, now: float) -> None:
        """Send Done. On a one-sided transport it follows the data, and a Writing wakes D."""
        complete = announce.complete
        digest = self.digests.take(complete.handoff_id)
        done = Done(complete.handoff_id, complete.num_tokens, complete.first_token, digest)
        self.poll_interval.linger(now)
        if self.is_one_sided:
            pair.channel.notify(announce.ticket, note_of(done))
            self.link.send(pair.link_id, Writing(complete.handoff_id))
        else:
            self.link.send(pair.link_id, done)
