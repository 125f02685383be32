"""KV worker: executes the actions of the two state machines on a control link and a transport.

The control link delivers messages to `inbox`, from any thread. Everything else runs on the engine
thread and never blocks, except for layer fences.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from baton.core.ids import HandoffId
from baton.kv_transfer.action_executor import ActionExecutor, PollInterval
from baton.kv_transfer.config import KvWorkerConfig
from baton.kv_transfer.driver import KvDriver
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.fence import PASSED, Fence
from baton.kv_transfer.link import Inbox, Link, LinkId
from baton.kv_transfer.pairs import Identity, Pairs, PeerPair
from baton.kv_transfer.protocol.conversion import StagingArea, describe_copy
from baton.kv_transfer.protocol.digest import Digests, HashBlocks
from baton.kv_transfer.protocol.incoming import IncomingState
from baton.kv_transfer.protocol.messages import (
    Closed,
    Grant,
    Hello,
    LinkMessage,
    Region,
    Writing,
    decode_done,
)
from baton.kv_transfer.protocol.receiver import Receiver
from baton.kv_transfer.protocol.sender import Sender
from baton.kv_transfer.records import TransferLedger, TransferRecord
from baton.kv_transfer.transports.base import (
    Arrived,
    BlocksLanded,
    CancelCompleted,
    ChannelBroken,
    ChannelEvent,
    Transport,
    WriteFailed,
    Written,
)
from baton.kv_transfer.types import KvOrders, KvReports, Receive


@dataclass(frozen=True, slots=True)
class KvCounters:
    """Counters since the start, and current values.

    Dropped messages were late or duplicate: harmless, but worth a look.
    """

    num_dropped: int = 0
    num_cut_pairs: int = 0
    num_digest_mismatches: int = 0
    num_fenced_blocks: int = 0  # current
    num_linked_peers: int = 0  # current
    num_linking_peers: int = 0  # current; Hello is not answered yet


class KvTransferWorker(KvDriver):
    """Driver of hand-offs and pulls. Its `inbox` implements LinkEvents."""

    def __init__(
        self,
        identity: Identity,
        region: Region,
        transport: Transport,
        link: Link,
        config: KvWorkerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,  # for records and for other threads
        hash_blocks: HashBlocks | None = None,  # required if the CPU cannot read the region
        staging: StagingArea | None = None,  # without it, peers with other blocks are refused
    ) -> None:
        config = config or KvWorkerConfig()
        self._transport = transport
        self._clock = clock
        self._receiver = Receiver(
            config.receiver, is_one_sided=transport.is_one_sided, staging=staging
        )
        num_layers = identity.fingerprint.layout.num_layers
        self._sender = Sender(region.block_bytes, config.sender, num_layers)
        self._has_whole_layers = region.block_bytes % num_layers == 0
        self._pairs = Pairs(
            identity,
            region,
            transport,
            link,
            self._receiver,
            self._sender,
            config,
            None if staging is None else staging.region,
        )
        is_staged = region.device != "cpu" and not transport.moves_device_memory
        sent_conversion = describe_copy(region.device, "cpu") if is_staged else ""
        self._ledger = TransferLedger(transport.name, region.block_bytes, clock, sent_conversion)
        self._digests = Digests(
            region, is_on=config.verify, hash_blocks=hash_blocks, staging=staging
        )
        self.inbox = Inbox(link, config, clock)
        self._poll_interval = PollInterval(config, self._receiver, self._sender)
        self._executor = ActionExecutor(
            self._receiver,
            self._sender,
            self._pairs,
            link,
            self._digests,
            self._ledger,
            self._poll_interval,
            is_one_sided=transport.is_one_sided,
            staging=staging,
        )
        # Layers of the current pass, counted up to each fence that has not passed yet, in order.
        self._layers: deque[tuple[int, Fence]] = deque()

    def __enter__(self) -> KvTransferWorker:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs:
            self._pairs.cut(pair.link_id, "the node is closing", self._clock())
        self._transport.close()

    # --- KvDriver: the engine thread -------------------------------------------------------

    def start(self, orders: KvOrders, now: float) -> None:
        # The previous pass must have written its blocks before they are sent or granted.
        self._wait_for_layers(now)
        self._read_inbox(now)
        self._ledger.begin(orders)
        for receive in orders.receives:
            self._receive(receive, now)
        for handoff_id in orders.revokes:
            self._receiver.revoke(handoff_id, now)
        for send in orders.sends:
            self._sender.send(send, now)
        for complete in orders.completes:
            self._ledger.note_computed(complete.handoff_id)
            self._sender.complete(complete, now)
        # Blocks that cannot be split by layer are sent whole by the Send after the pass.
        for layer_send in orders.layer_sends if self._has_whole_layers else ():
            self._sender.send_layers(layer_send, now)
        for withdraw in orders.withdraws:
            self._sender.withdraw(withdraw, now)
        self._finish_turn(now)

    def layer_done(self, layer: int, now: float, fence: Fence = PASSED) -> None:
        """Record that the pass has launched `layer`. It is sent once `fence` has passed."""
        self._layers.append((layer + 1, fence))
        self.progress(now)

    def pass_done(self, now: float) -> None:
        """Send the remaining layers of the pass, waiting for their fences.

        If no layer is to be sent, return at once: the runner waits for the device anyway.
        """
        if self._sender.awaits_layers:
            self._wait_for_layers(now)

    def progress(self, now: float) -> None:
        """Drive the transport. Also called during long steps; `poll` reports completions."""
        while self._layers and self._layers[0][1].is_passed:
            num_ended, _ = self._layers.popleft()
            self._sender.layer_done(num_ended, now)
            self._executor.execute_all(now)
        self._read_inbox(now)
        for pair in self._pairs:
            for event in pair.channel.poll():
                self._handle_event(pair, event, now)
                self._executor.execute_all(now)
        self._sender.report_progress()
        if self._poll_interval.is_tick_due(now):
            self._receiver.tick(now)
            self._sender.tick(now)
            self._pairs.tick(now)
        self._finish_turn(now)

    def poll(self, now: float) -> KvReports:
        self.progress(now)
        reports = self._receiver.take_reports(
            finished_sending=self._sender.take_finished(),
            requested=self._sender.take_requested(),
            granted=self._sender.take_granted(),
        )
        self._ledger.begin_given(reports.requested)
        self._close_records(reports)
        return reports

    def next_poll_s(self, now: float) -> float | None:
        """Return the delay until `poll` is due; None: only after a message in the inbox."""
        return 0.0 if self.inbox else self._poll_interval.next_poll_s(now)

    def connect(self, address: str, now: float) -> None:
        """Connect to the P at `address` ahead of the first hand-off, which reports any error."""
        with suppress(PeerUnreachable):
            self._pairs.get_or_dial(address, now)

    # --- Observability ---------------------------------------------------------------------

    def take_records(self) -> tuple[TransferRecord, ...]:
        """Return the hand-offs that ended since the last call. Engine thread only."""
        return self._ledger.take()

    def counters(self) -> KvCounters:
        fenced = (i for i in self._receiver.incoming() if i.state is IncomingState.FENCED)
        return KvCounters(
            num_dropped=self._pairs.num_dropped
            + self._receiver.num_dropped
            + self._sender.num_dropped,
            num_cut_pairs=self._pairs.num_cut,
            num_digest_mismatches=self._digests.num_mismatches,
            num_fenced_blocks=sum(len(incoming.order.block_ids) for incoming in fenced),
            num_linked_peers=sum(pair.peer is not None for pair in self._pairs),
            num_linking_peers=sum(pair.peer is None for pair in self._pairs),
        )

    def open_handoffs(self) -> tuple[HandoffId, ...]:
        """Return all hand-offs that have not ended on this node, fenced ones included."""
        incoming = [incoming.order.handoff_id for incoming in self._receiver.incoming()]
        return (*incoming, *(outgoing.handoff_id for outgoing in self._sender.outgoing()))

    def _wait_for_layers(self, now: float) -> None:
        while self._layers:
            self._layers[0][1].wait()
            self.progress(now)

    # --- Orders that need a link -------------------------------------------------------------

    def _receive(self, receive: Receive, now: float) -> None:
        try:
            link_id = self._pairs.get_or_dial(receive.source.address, now)
        except PeerUnreachable as error:
            self._receiver.reject(receive.handoff_id, str(error))
        else:
            self._receiver.receive(receive, link_id, now)

    # --- Control messages --------------------------------------------------------------------

    def _read_inbox(self, now: float) -> None:
        for link_id, message in self.inbox.take():
            if isinstance(message, str):
                self._pairs.cut(link_id, f"link lost: {message}", now)
            elif isinstance(message, Hello):
                self._pairs.handle_hello(link_id, message, now)
            elif isinstance(message, Closed):
                self._pairs.handle_closed(link_id, message, now)
            else:
                self._handle_message(link_id, message, now)
            self._executor.execute_all(now)

    def _handle_message(self, link_id: LinkId, message: LinkMessage, now: float) -> None:
        pair = self._pairs.get(link_id)
        if pair is None:
            self._pairs.num_dropped += 1
        elif pair.is_dialled:
            pair.last_message_s = now
            if isinstance(message, Writing):
                self._poll_interval.burst(now)
            self._receiver.handle_message(link_id, message, now)
        elif isinstance(message, Grant) and not pair.has_blocks(message.block_ids):
            self._pairs.cut(link_id, "it granted blocks that it does not have", now)
        else:
            self._sender.handle_message(link_id, message, now)

    # --- Events of the data path -----------------------------------------------------------

    def _handle_event(self, pair: PeerPair, event: ChannelEvent, now: float) -> None:
        match event:
            case Written(write_id):
                write = self._sender.find_write(write_id)
                if write is not None:
                    self._ledger.written(*write)
                self._sender.written(pair.link_id, write_id, now)
            case WriteFailed(write_id, reason):
                self._sender.write_failed(pair.link_id, write_id, reason)
            case Arrived(ticket, note):
                self._handle_arrival(pair, ticket, note, now)
            case BlocksLanded(ticket, num_blocks):
                self._receiver.landing(pair.link_id, ticket, num_blocks)
            case CancelCompleted(ticket):
                self._receiver.handle_cancel_completed(pair.link_id, ticket)
            case ChannelBroken(reason):
                self._pairs.cut(pair.link_id, reason, now)

    def _handle_arrival(self, pair: PeerPair, ticket: int, note: bytes, now: float) -> None:
        try:
            done = decode_done(note) if note else None
        except PeerUnreachable as error:
            self._pairs.cut(pair.link_id, str(error), now)
            return
        self._receiver.arrived(pair.link_id, ticket, done)

    def _finish_turn(self, now: float) -> None:
        """Execute the remaining actions. A long pass may follow, so that peers need keep-alives."""
        self._executor.execute_all(now)
        self.inbox.set_keep_alives(self._receiver.renewals())

    def _close_records(self, reports: KvReports) -> None:
        for landed in reports.finished_recving:
            self._digests.forget(landed.handoff_id)
            self._ledger.landed(landed.handoff_id)
        for lost in reports.failed_recving:
            self._ledger.end(lost.handoff_id, lost.reason)
        for handoff_id in reports.released:
            self._digests.forget(handoff_id)
            self._ledger.end(handoff_id, "revoked")
        for handoff_id in reports.finished_sending:
            self._digests.forget(handoff_id)
            self._ledger.end(handoff_id, self._sender.why_ended(handoff_id))
