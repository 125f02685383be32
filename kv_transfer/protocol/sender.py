"""Sender state machine: writes of P into granted blocks, and lifetime of their source blocks.

Pure: takes events and the current time, returns actions and reports. States of a send:

    HELD ──Grant──▶ PUSHING ──all written──▶ (announced)
      │                │ revoked, withdrawn, lease expired, write failed, link cut
      ▼                ▼
    (ended)         ENDING ──nothing in flight──▶ (ended)

A send is reported as finished once it has ended *and* the scheduler has given its final order
(Complete or Withdraw). Nothing is posted without a grant whose lease is live by P's own clock.

A pull begins with its grant, which is reported to the scheduler as Requested. The scheduler's
orders follow, even if the pull has ended meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from baton.core.ids import HandoffId
from baton.kv_transfer.config import SenderConfig
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.actions import (
    Action,
    BreakLink,
    DigestBlocks,
    PostWrite,
    SendDone,
    SendMessage,
)
from baton.kv_transfer.protocol.messages import (
    Failed,
    Grant,
    LinkMessage,
    Renew,
    Revoked,
    RevokeGrant,
)
from baton.kv_transfer.protocol.outgoing import (
    OutgoingHandoff,
    OutgoingState,
    WriteInFlight,
    WritePart,
    WriteSplitter,
)
from baton.kv_transfer.transports.base import Write
from baton.kv_transfer.types import Complete, Requested, Send, Withdraw


@dataclass(slots=True)
class _ReceiverLink:
    last_ticket: int = 0  # grants up to this ticket are handled; older ones are dropped
    num_bytes_in_flight: int = 0
    is_broken: bool = False  # a write failed; the link is about to be cut


class Sender:
    def __init__(self, block_bytes: int, config: SenderConfig, num_layers: int = 1) -> None:
        self._config = config
        # Per link, and room for one block at least: below that, nothing would ever be posted.
        self._max_in_flight_bytes = max(block_bytes, config.max_in_flight_bytes)
        self._splitter = WriteSplitter(block_bytes, num_layers, config.max_write_bytes)
        self._outgoing: dict[HandoffId, OutgoingHandoff] = {}
        # Why sends have ended: a grant that comes later is answered instead of never.
        self._ended: OrderedDict[HandoffId, str] = OrderedDict()
        self._links: dict[LinkId, _ReceiverLink] = {}
        self._outgoing_by_write: dict[int, OutgoingHandoff] = {}  # writes in flight
        self._num_writes = 0
        self._actions: list[Action] = []
        self._finished: list[HandoffId] = []
        self._requested: list[Requested] = []
        self._granted: list[HandoffId] = []
        self.num_dropped = 0

    # --- Orders of the scheduler -------------------------------------------------------

    def send(self, order: Send, now: float) -> None:
        """Queue computed blocks for sending. They follow those of the earlier orders."""
        outgoing = self._get_or_create(order.handoff_id)
        outgoing.check_follows(order)
        if order.block_ids[: len(outgoing.coming)] != outgoing.coming:
            raise ValueError(f"{order.handoff_id}: blocks differ from those sent by layer")
        # What was sent of them layer by layer is kept in `sliced`: only the rest is posted now.
        outgoing.coming = ()
        outgoing.blocks += order.block_ids
        self._push(outgoing, now)

    def send_layers(self, order: Send, now: float) -> None:
        """Queue blocks that the next forward pass computes, for sending layer by layer."""
        outgoing = self._get_or_create(order.handoff_id)
        outgoing.check_follows(order)
        if outgoing.coming:
            raise ValueError(f"{order.handoff_id}: the blocks of the last pass were not sent")
        outgoing.coming, outgoing.num_layers_ended = order.block_ids, 0

    def layer_done(self, num_ended: int, now: float) -> None:
        """Record that the current pass has written its first `num_ended` layers, and send them."""
        for outgoing in list(self._outgoing.values()):
            if outgoing.coming:
                outgoing.num_layers_ended = num_ended
                self._push(outgoing, now)

    @property
    def awaits_layers(self) -> bool:
        """Return whether blocks of the current pass are to be sent layer by layer."""
        return any(outgoing.coming for outgoing in self._outgoing.values())

    def complete(self, order: Complete, now: float) -> None:
        outgoing = self._get_or_create(order.handoff_id)
        outgoing.complete = order
        outgoing.has_final_order = True
        # Not before: while the prompt is computed, the deadline is that of the request.
        if outgoing.state is OutgoingState.HELD:
            outgoing.held_until_s = now + self._config.hold_s
        self._push(outgoing, now)

    def withdraw(self, order: Withdraw, now: float) -> None:
        outgoing = self._get_or_create(order.handoff_id)
        outgoing.has_final_order = True
        self._fail(outgoing, order.reason)
        self._end_if_over(outgoing)

    # --- Events of the control link ----------------------------------------------------

    def link_up(self, link_id: LinkId) -> None:
        self._links[link_id] = _ReceiverLink()

    def handle_message(self, link_id: LinkId, message: LinkMessage, now: float) -> None:
        """Handle a message of D. Drop and count unexpected ones."""
        link = self._links.get(link_id)
        if link is None or link.is_broken:
            self.num_dropped += 1
        elif isinstance(message, Grant):
            self._handle_grant(link_id, link, message, now)
        elif isinstance(message, Renew):
            self._handle_renew(link_id, message, now)
        elif isinstance(message, RevokeGrant):
            self._handle_revoke(link_id, link, message)
        else:
            self.num_dropped += 1

    def handle_link_cut(self, link_id: LinkId, reason: str) -> None:
        """End the sends of a link whose local end of the data path is destroyed.

        No write of that link reads local memory any more.
        """
        if self._links.pop(link_id, None) is None:
            return
        for outgoing in [send for send in self._outgoing.values() if send.link_id == link_id]:
            for write_id in outgoing.in_flight:
                del self._outgoing_by_write[write_id]
            outgoing.in_flight.clear()
            outgoing.link_id = None  # nothing more is sent on a link that is cut
            self._fail(outgoing, reason)
            self._end_if_over(outgoing)

    # --- Events of the data path -------------------------------------------------------

    def written(self, link_id: LinkId, write_id: int, now: float) -> None:
        outgoing = self._end_write(link_id, write_id)
        if outgoing is None:
            self.num_dropped += 1
            return
        self._end_if_over(outgoing)
        for other in list(self._outgoing.values()):
            self._push(other, now)  # the in-flight limit has room again

    def write_failed(self, link_id: LinkId, write_id: int, reason: str) -> None:
        """Fail the send and break the link: parts of the failed write may still land."""
        outgoing = self._end_write(link_id, write_id)
        if outgoing is None:
            self.num_dropped += 1
            return
        # The cut takes effect with its action; until then nothing more may begin on this link.
        self._links[link_id].is_broken = True
        self._fail(outgoing, reason)
        self._actions.append(BreakLink(link_id, f"a write failed: {reason}"))

    def report_progress(self) -> None:
        """Send Writing for each send whose progress has changed.

        D must poll for writes in flight to complete, and can digest the blocks that have landed.
        After the last write, no other message wakes D. Call this after polling the data path:
        most writes have completed by then and need no message.
        """
        for outgoing in self._outgoing.values():
            writing = outgoing.take_progress()
            if writing is not None:
                self._send_to_peer(outgoing, writing)

    # --- Time ----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Fail sends past their deadline, and break links on which a write does not end."""
        timeout_s = self._config.write_timeout_s
        for outgoing in list(self._outgoing.values()):
            # A write cannot be taken back: only the end of its link keeps it from landing later.
            if outgoing.is_stuck(now, timeout_s) and outgoing.link_id is not None:
                reason = f"a write did not end in {timeout_s:g} s"
                self._actions.append(BreakLink(outgoing.link_id, reason))
            elif now >= outgoing.deadline_s:
                is_held = outgoing.state is OutgoingState.HELD
                self._fail(outgoing, "never granted in time" if is_held else "the lease ended")
                self._end_if_over(outgoing)

    # --- Output for the KV worker --------------------------------------------------------

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def take_finished(self) -> tuple[HandoffId, ...]:
        """Return each finished send once. Its source blocks are not read any more."""
        finished, self._finished = tuple(self._finished), []
        return finished

    def take_requested(self) -> tuple[Requested, ...]:
        """Return each pull by a peer once."""
        requested, self._requested = tuple(self._requested), []
        return requested

    def take_granted(self) -> tuple[HandoffId, ...]:
        """Return each hand-off once that a peer has granted."""
        granted, self._granted = tuple(self._granted), []
        return granted

    def outgoing(self) -> Iterator[OutgoingHandoff]:
        """Iterate over the sends that have not ended."""
        return iter(self._outgoing.values())

    def why_ended(self, handoff_id: HandoffId) -> str:
        """Return the outcome of an ended send: "announced", or the reason of its failure."""
        return self._ended.get(handoff_id, "forgotten")

    @property
    def has_flights(self) -> bool:
        return bool(self._outgoing_by_write)

    @property
    def has_sends(self) -> bool:
        return bool(self._outgoing)

    def find_write(self, write_id: int) -> tuple[HandoffId, int] | None:
        """Return the hand-off and the size in bytes of a write in flight."""
        outgoing = self._outgoing_by_write.get(write_id)
        if outgoing is None:
            return None
        return outgoing.handoff_id, outgoing.in_flight[write_id].num_bytes

    # --- Message handlers ------------------------------------------------------------------

    def _handle_grant(self, link_id: LinkId, link: _ReceiverLink, grant: Grant, now: float) -> None:
        if grant.ticket <= link.last_ticket:
            self.num_dropped += 1  # duplicate, out of order, or revoked before it arrived
            return
        # Also of a grant that is refused below: a copy of it must not succeed later.
        link.last_ticket = grant.ticket
        outgoing = self._outgoing.get(grant.handoff_id)
        if outgoing is None and grant.handoff_id in self._ended:
            self._send_message(link_id, Failed(grant.handoff_id, self._ended[grant.handoff_id]))
            return
        if outgoing is None:
            # D was faster than the scheduler's first order, or this is a pull.
            outgoing = self._outgoing[grant.handoff_id] = OutgoingHandoff(grant.handoff_id)
            if grant.names:
                self._requested.append(Requested(grant.handoff_id, grant.names))
        elif grant.names:
            self._send_message(link_id, Failed(grant.handoff_id, "the id is in use: it is no pull"))
            return
        if outgoing.state is not OutgoingState.HELD:
            reason = outgoing.why_ended or "granted twice"
            self._send_message(link_id, Failed(grant.handoff_id, reason))
            return
        outgoing.move(OutgoingState.PUSHING)
        outgoing.link_id, outgoing.grant = link_id, grant
        outgoing.lease_until_s = now + grant.lease_s
        if not grant.names:
            self._granted.append(grant.handoff_id)
        self._push(outgoing, now)

    def _handle_renew(self, link_id: LinkId, renew: Renew, now: float) -> None:
        for handoff_id in renew.handoff_ids:
            outgoing = self._find_on_link(link_id, handoff_id)
            if outgoing is not None and outgoing.state is OutgoingState.PUSHING:
                outgoing.lease_until_s = now + renew.lease_s
                # A lease that had just ended may have kept blocks back.
                self._push(outgoing, now)

    def _handle_revoke(self, link_id: LinkId, link: _ReceiverLink, message: RevokeGrant) -> None:
        link.last_ticket = max(link.last_ticket, message.ticket)
        outgoing = self._find_on_link(link_id, message.handoff_id)
        if outgoing is None:
            # The grant was never accepted on this link; `last_ticket` now rules it out.
            self._send_message(link_id, Revoked(message.handoff_id))
            return
        # Answered once nothing is in flight: until then D keeps its blocks fenced.
        outgoing.must_answer_revoke = True
        self._fail(outgoing, "revoked")
        self._end_if_over(outgoing)

    # --- Transitions -----------------------------------------------------------------------

    def _push(self, outgoing: OutgoingHandoff, now: float) -> None:
        """Post what can be posted now, and end the send if that was all."""
        self._post_ready(outgoing, now)
        self._end_if_over(outgoing)

    def _post_ready(self, outgoing: OutgoingHandoff, now: float) -> None:
        """Post computed and granted blocks while the lease and the in-flight limit allow it."""
        grant, link_id = outgoing.grant, outgoing.link_id
        if outgoing.state is not OutgoingState.PUSHING or grant is None or link_id is None:
            return
        is_begun = outgoing.blocks or outgoing.coming
        if is_begun and grant.first_block < outgoing.first_block:
            self._fail(outgoing, "granted blocks that were never computed")
            return
        link = self._links[link_id]
        if now >= outgoing.lease_until_s or link.is_broken:
            return
        while True:
            # Little in flight: all of it may still land after the lease, and holds D's fence up.
            room_bytes = self._max_in_flight_bytes - link.num_bytes_in_flight
            part = self._splitter.take_next(outgoing, grant, room_bytes)
            if part is None:
                return
            if part.num_bytes:
                link.num_bytes_in_flight += part.num_bytes
                write = self._begin_write(outgoing, grant, part, now)
                self._actions.append(PostWrite(link_id, outgoing.handoff_id, write))
            if part.is_complete:
                self._actions.append(DigestBlocks(outgoing.handoff_id, part.sources))

    def _begin_write(
        self, outgoing: OutgoingHandoff, grant: Grant, part: WritePart, now: float
    ) -> Write:
        self._num_writes += 1
        write_id = self._num_writes
        self._outgoing_by_write[write_id] = outgoing
        outgoing.in_flight[write_id] = WriteInFlight(now, part.num_bytes, part.first)
        targets = grant.block_ids[part.first : part.first + len(part.sources)]
        return Write(write_id, grant.ticket, part.first, part.sources, targets, part.layers)

    def _end_write(self, link_id: LinkId, write_id: int) -> OutgoingHandoff | None:
        """Return the send of a write that has ended; None if it is unknown."""
        outgoing = self._outgoing_by_write.pop(write_id, None)
        if outgoing is not None:
            flight = outgoing.in_flight.pop(write_id)
            self._links[link_id].num_bytes_in_flight -= flight.num_bytes
        return outgoing

    def _fail(self, outgoing: OutgoingHandoff, reason: str) -> None:
        """Stop posting writes of this send and report the failure to D."""
        if outgoing.state is OutgoingState.ENDING:
            return
        outgoing.move(OutgoingState.ENDING)
        outgoing.why_ended = reason
        # D has revoked it otherwise, and waits for Revoked alone.
        if not outgoing.must_answer_revoke:
            self._send_to_peer(outgoing, Failed(outgoing.handoff_id, reason))

    def _end_if_over(self, outgoing: OutgoingHandoff) -> None:
        if outgoing.in_flight:
            return
        if outgoing.state is OutgoingState.PUSHING:
            self._announce_if_complete(outgoing)
        elif outgoing.state is OutgoingState.ENDING:
            if outgoing.must_answer_revoke:
                outgoing.must_answer_revoke = False
                self._send_to_peer(outgoing, Revoked(outgoing.handoff_id))
                # D gives its blocks to others now. No message about them may follow.
                outgoing.link_id = None
            if outgoing.has_final_order or not outgoing.is_ordered:
                self._end(outgoing)

    def _announce_if_complete(self, outgoing: OutgoingHandoff) -> None:
        grant, complete, link_id = outgoing.grant, outgoing.complete, outgoing.link_id
        if grant is None or complete is None or link_id is None:
            return
        # Complete is the last order: what is not computed by now never will be.
        if outgoing.num_posted < len(grant.block_ids):
            if self._splitter.num_ready(outgoing, grant) < len(grant.block_ids):
                self._fail(outgoing, "fewer blocks were computed than granted")
                self._end_if_over(outgoing)
            return
        self._actions.append(SendDone(link_id, grant.ticket, complete))
        outgoing.why_ended = "announced"
        self._end(outgoing)

    def _end(self, outgoing: OutgoingHandoff) -> None:
        outgoing.move(OutgoingState.ENDED)
        del self._outgoing[outgoing.handoff_id]
        self._ended[outgoing.handoff_id] = outgoing.why_ended
        while len(self._ended) > self._config.num_remembered:
            self._ended.popitem(last=False)
        # The scheduler knows nothing of others: their first order may still come.
        if outgoing.is_ordered:
            self._finished.append(outgoing.handoff_id)

    # --- Lookups ---------------------------------------------------------------------------

    def _get_or_create(self, handoff_id: HandoffId) -> OutgoingHandoff:
        """Return the send of an order, created if new.

        A send that ended before its first order is created as ENDING.
        """
        outgoing = self._outgoing.get(handoff_id)
        if outgoing is None:
            outgoing = self._outgoing[handoff_id] = OutgoingHandoff(handoff_id)
            if handoff_id in self._ended:
                outgoing.move(OutgoingState.ENDING)
                outgoing.why_ended = self._ended[handoff_id]
        outgoing.is_ordered = True
        return outgoing

    def _find_on_link(self, link_id: LinkId, handoff_id: HandoffId) -> OutgoingHandoff | None:
        outgoing = self._outgoing.get(handoff_id)
        return outgoing if outgoing is not None and outgoing.link_id == link_id else None

    def _send_to_peer(self, outgoing: OutgoingHandoff, message: LinkMessage) -> None:
        if outgoing.link_id is not None:
            self._send_message(outgoing.link_id, message)

    def _send_message(self, link_id: LinkId, message: LinkMessage) -> None:
        self._actions.append(SendMessage(link_id, message))
