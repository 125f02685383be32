"""Receiver state machine: ownership of the blocks that D grants to its peers.

Pure: takes events and the current time, returns actions and reports. States of a receive:

    WAITING ──link up──▶ GRANTED ──Done and data arrived──▶ (landed)
       │                    │ revoked, failed, peer silent, link cut
       ▼                    ▼
    (released)           FENCED ──no write can land any more──▶ (released)

Time never ends a fence. A fence ends when P reports that none of its writes is in flight
(one-sided), when the posted receives are cancelled (two-sided), or when the data path is
destroyed: D's end of it, and also P's where P accesses D's memory directly.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.ids import HandoffId
from baton.kv_transfer.config import ReceiverConfig
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.actions import (
    Action,
    BreakLink,
    CancelWrites,
    CheckDigest,
    ConvertStaged,
    DigestBlocks,
    ExpectWrites,
    ProveBlocks,
    SendMessage,
)
from baton.kv_transfer.protocol.conversion import Conversion, StagingArea
from baton.kv_transfer.protocol.incoming import IncomingHandoff, IncomingState, SenderLink
from baton.kv_transfer.protocol.messages import (
    Done,
    Failed,
    Grant,
    LinkMessage,
    Renew,
    Renewed,
    Revoked,
    RevokeGrant,
    Writing,
)
from baton.kv_transfer.types import KvReports, Landed, Lost, Proved, Receive, Requested


class Receiver:
    def __init__(
        self, config: ReceiverConfig, *, is_one_sided: bool, staging: StagingArea | None = None
    ) -> None:
        self._config = config
        self._staging = staging
        self._is_one_sided = is_one_sided
        self._incoming: dict[HandoffId, IncomingHandoff] = {}
        self._links: dict[LinkId, SenderLink] = {}
        self._incoming_by_ticket: dict[int, IncomingHandoff] = {}
        self._num_tickets = 0
        self._actions: list[Action] = []
        self._landed: list[Landed] = []
        self._failed: list[Lost] = []
        self._proved: list[Proved] = []
        self._released: list[HandoffId] = []
        self.num_dropped = 0  # messages and events of unknown hand-offs

    # --- Orders of the scheduler -------------------------------------------------------

    def receive(self, order: Receive, link_id: LinkId, now: float) -> None:
        """Grant these blocks to the peer, now or when the link comes up."""
        if order.handoff_id in self._incoming:
            raise ValueError(f"{order.handoff_id} is being received already")
        link = self._get_link(link_id, now)
        incoming = IncomingHandoff(order, link_id, began_s=now)
        self._incoming[order.handoff_id] = incoming
        link.add(incoming, now)
        if link.is_up:
            self._grant(incoming)

    def reject(self, handoff_id: HandoffId, reason: str) -> None:
        """Report a receive whose peer cannot be reached as failed. Nothing was granted."""
        self._failed.append(Lost(handoff_id, reason))
        self._released.append(handoff_id)

    def revoke(self, handoff_id: HandoffId, now: float) -> None:
        """Cancel a receive to get its blocks back. Ignored if it has ended or is fenced already."""
        # The scheduler has given it up: a failure that it has not polled yet is no news.
        self._failed = [lost for lost in self._failed if lost.handoff_id != handoff_id]
        incoming = self._incoming.get(handoff_id)
        if incoming is None:
            return
        if incoming.state is IncomingState.WAITING:
            self._release(incoming)
        elif incoming.state is IncomingState.GRANTED:
            self._report_proved(incoming)
            self._fence(incoming, now)

    # --- Events of the control link ----------------------------------------------------

    def link_up(self, link_id: LinkId, now: float, conversion: Conversion | None = None) -> None:
        """Mark the link as up, after compatible Hellos in both directions, and send its grants.

        With a conversion, the peer's blocks are received in the staging area.
        """
        link = self._get_link(link_id, now)
        if link.is_up or link.is_cut:
            return
        link.come_up(now, conversion)
        for incoming in list(link.incoming.values()):
            self._grant(incoming)

    def handle_message(self, link_id: LinkId, message: LinkMessage, now: float) -> None:
        """Handle a message of P. Drop and count it if it names no receive of this link."""
        link = self._links.get(link_id)
        is_sign_of_life = isinstance(message, Renewed)
        if link is None or link.is_cut or not (link.is_up or is_sign_of_life):
            self.num_dropped += 1
            return
        # A Renewed comes from a thread of P that also answers during a long pass, before P's engine
        # thread has replied to Hello. It proves that P is alive, and nothing else.
        link.last_message_s = now
        if is_sign_of_life:
            return
        if not isinstance(message, Done | Failed | Revoked | Writing):
            self.num_dropped += 1
            return
        incoming = self._incoming.get(message.handoff_id)
        if incoming is None or incoming.link_id != link_id:
            # A Writing that arrives after its data is expected.
            self.num_dropped += not isinstance(message, Writing)
            return
        self._handle_handoff_message(incoming, message, now)

    def _handle_handoff_message(
        self, incoming: IncomingHandoff, message: Done | Failed | Revoked | Writing, now: float
    ) -> None:
        is_granted = incoming.state is IncomingState.GRANTED
        if isinstance(message, Writing):
            self._handle_writing(incoming, message)
        elif isinstance(message, Failed) and is_granted:
            self._fail(incoming, f"the peer: {message.reason}", now)
        elif isinstance(message, Done) and is_granted and incoming.done is None:
            incoming.done = message
            self._land_if_complete(incoming)
        # One-sided, only P knows that none of its writes is in flight. Two-sided, it does not know
        # what the transport still has: there the cancelled receives end the fence.
        elif isinstance(message, Revoked) and not is_granted and self._is_one_sided:
            self._release(incoming)
        else:
            self.num_dropped += 1

    def _handle_writing(self, incoming: IncomingHandoff, writing: Writing) -> None:
        incoming.is_writing = True
        # Two-sided, P only knows what it has sent; the transport reports what has landed.
        if self._is_one_sided:
            self._digest_early(incoming, writing.num_written)
        if writing.digest is not None and incoming.state is IncomingState.GRANTED:
            handoff_id = incoming.order.handoff_id
            self._actions.append(ProveBlocks(handoff_id, writing.num_written, writing.digest))

    def _digest_early(self, incoming: IncomingHandoff, num_written: int) -> None:
        landed = incoming.block_ids[incoming.num_written : num_written]
        if landed and incoming.state is IncomingState.GRANTED:
            incoming.num_written += len(landed)
            self._actions.append(DigestBlocks(incoming.order.handoff_id, landed))

    def handle_link_cut(
        self, link_id: LinkId, reason: str, now: float, *, writes_stopped: bool
    ) -> None:
        """Fail the receives of a link whose local end of the data path is destroyed.

        Their blocks are released if that stops all writes (`writes_stopped`), else fenced.
        """
        link = self._links.get(link_id)
        if link is None or link.is_cut:
            return
        link.is_cut = True
        for incoming in list(link.incoming.values()):
            if incoming.state is not IncomingState.FENCED:
                self._report_failed(incoming, reason)
            if writes_stopped or incoming.state is IncomingState.WAITING:
                self._release(incoming)
            elif incoming.state is IncomingState.GRANTED:
                # P may write to D's memory without D: until P's end is destroyed, too.
                incoming.fence(now)
        self._forget_if_unused(link_id)

    def handle_peer_cut(self, link_id: LinkId) -> None:
        """Release fenced blocks: P's end is destroyed, or P is dead. Requires `handle_link_cut`."""
        link = self._links.get(link_id)
        if link is not None and link.is_cut:
            for incoming in list(link.incoming.values()):
                self._release(incoming)
            self._forget_if_unused(link_id)

    # --- Events of the data path -------------------------------------------------------

    def arrived(self, link_id: LinkId, ticket: int, done: Done | None = None) -> None:
        """Record that all data of a grant has landed; one-sided transports pass P's Done along."""
        incoming = self._find_by_ticket(link_id, ticket)
        # Peers are not trusted: a Done must name the hand-off of its ticket.
        is_matching = done is None or (incoming and done.handoff_id == incoming.order.handoff_id)
        if incoming is None or not is_matching:
            self.num_dropped += 1
            return
        # Done and the data come by different ways, in either order. Each of them is needed.
        incoming.has_arrived = True
        incoming.done = incoming.done or done
        if incoming.state is IncomingState.GRANTED:
            self._land_if_complete(incoming)

    def landing(self, link_id: LinkId, ticket: int, num_blocks: int) -> None:
        """Record that the first `num_blocks` blocks of a grant are complete."""
        incoming = self._find_by_ticket(link_id, ticket)
        if incoming is not None:
            self._digest_early(incoming, num_blocks)

    def handle_cancel_completed(self, link_id: LinkId, ticket: int) -> None:
        incoming = self._find_by_ticket(link_id, ticket)
        if incoming is None or incoming.state is not IncomingState.FENCED:
            self.num_dropped += 1
            return
        self._release(incoming)

    def checked(self, handoff_id: HandoffId, *, is_good: bool) -> None:
        """Handle the result of CheckDigest. All writes have ended, so a mismatch needs no fence."""
        incoming = self._incoming.get(handoff_id)
        if incoming is None or incoming.state is not IncomingState.GRANTED:
            self.num_dropped += 1
        elif is_good:
            self._land(incoming)
        else:
            # What was right when it was proved may have been overwritten since.
            incoming.num_proved = 0
            self._report_failed(
                incoming, "digest mismatch: the received bytes differ from those sent"
            )
            self._release(incoming)

    def proved(self, handoff_id: HandoffId, num_blocks: int) -> None:
        """Record that the first blocks are complete and hold what P has sent."""
        incoming = self._incoming.get(handoff_id)
        # Staged blocks are of P's layout: they are no blocks of the cache yet.
        if incoming is not None and incoming.staged is None:
            incoming.num_proved = max(incoming.num_proved, num_blocks)

    # --- Time ----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send renewals that are due, and fail receives and links past their deadline."""
        # A peer that answers renewals for ever without writing is alive by all other rules.
        give_up_s = self._config.give_up_s
        for incoming in list(self._incoming.values()):
            if incoming.state is IncomingState.GRANTED and now >= incoming.began_s + give_up_s:
                self._fail(incoming, f"gave up after {give_up_s:g} s", now)
        wait_s = self._config.max_staging_wait_s
        for incoming in list(self._waiting_for_room()):
            # Room that an earlier one leaves may have gone to this one.
            if incoming.state is IncomingState.WAITING and now >= incoming.began_s + wait_s:
                self._report_failed(incoming, f"no room in kv-staging-memory within {wait_s:g} s")
                self._release(incoming)
        for link_id, link in self._links.items():
            if not link.awaits_peer:
                continue
            renew = link.take_due_renew(now)
            if renew is not None:
                self._send_message(link_id, renew)
            reason = link.break_reason(now)
            if reason is not None:
                self._actions.append(BreakLink(link_id, reason))

    # --- Output for the KV worker --------------------------------------------------------

    def take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def take_reports(
        self,
        finished_sending: tuple[HandoffId, ...] = (),
        requested: tuple[Requested, ...] = (),
        granted: tuple[HandoffId, ...] = (),
    ) -> KvReports:
        """Return the events since the last call, with those of the sender."""
        reports = KvReports(
            finished_recving=tuple(self._landed),
            failed_recving=tuple(self._failed),
            proved=tuple(self._proved),
            released=tuple(self._released),
            finished_sending=finished_sending,
            requested=requested,
            granted=granted,
        )
        self._landed, self._failed, self._proved, self._released = [], [], [], []
        return reports

    def incoming(self) -> Iterator[IncomingHandoff]:
        """Iterate over the receives that have not ended."""
        return iter(self._incoming.values())

    def renewals(self) -> tuple[tuple[LinkId, Renew], ...]:
        """Return the keep-alives that other threads can send while the engine thread is busy."""
        return tuple(
            (link_id, link.make_renew())
            for link_id, link in self._links.items()
            if link.awaits_peer
        )

    def has_fenced_blocks(self, link_id: LinkId) -> bool:
        """Return whether blocks of a cut link are fenced until the peer's end is destroyed."""
        return link_id in self._links

    # --- Transitions -----------------------------------------------------------------------

    def _grant(self, incoming: IncomingHandoff) -> None:
        conversion = self._links[incoming.link_id].conversion
        if conversion is not None and not self._stage(incoming, conversion):
            return
        # A ticket is never used again: what is late for one grant cannot count for another.
        self._num_tickets += 1
        incoming.ticket = self._num_tickets
        incoming.move(IncomingState.GRANTED)
        order = incoming.order
        self._incoming_by_ticket[incoming.ticket] = incoming
        # Before the Grant: two-sided, P's first bytes must find their receive posted.
        self._actions.append(ExpectWrites(incoming.link_id, incoming.ticket, incoming.block_ids))
        self._send_message(
            incoming.link_id,
            Grant(
                order.handoff_id,
                incoming.ticket,
                incoming.first_block,
                incoming.block_ids,
                self._config.lease_s,
                order.names,
            ),
        )

    def _stage(self, incoming: IncomingHandoff, conversion: Conversion) -> bool:
        """Borrow blocks of the sender's layout. Returns False while, or if, there is no room."""
        staging, order = self._staging, incoming.order
        # Names are of blocks of one layout: P holds none of these names.
        if order.names and conversion.changes_layout:
            self._refuse(incoming, "a pull needs a peer with blocks of the same layout")
            return False
        if staging is None:
            raise RuntimeError(f"{order.handoff_id} is to be converted without a staging area")
        if not staging.fits(conversion, order):
            needed = len(conversion.map(order).source) * conversion.region.block_bytes
            self._refuse(
                incoming,
                f"its KV takes {needed} bytes before conversion, and kv-staging-memory is"
                f" {staging.region.num_bytes} bytes",
            )
            return False
        # In order of arrival: smaller ones would take the room of a large one again and again.
        if next(self._waiting_for_room(), incoming) is incoming:
            incoming.staged = staging.lend(conversion, order)
        return incoming.staged is not None

    def _waiting_for_room(self) -> Iterator[IncomingHandoff]:
        """Iterate over the receives that only lack room in the staging area, oldest first."""
        for incoming in self._incoming.values():
            link = self._links[incoming.link_id]
            if incoming.state is IncomingState.WAITING and link.is_up and not link.is_cut:
                yield incoming

    def _grant_waiting(self) -> None:
        """Grant the receives that lack room, in order, as far as there is some now."""
        if self._staging is None:
            return
        while (incoming := next(self._waiting_for_room(), None)) is not None:
            self._grant(incoming)
            if incoming.state is IncomingState.WAITING:
                return

    def _land_if_complete(self, incoming: IncomingHandoff) -> None:
        if incoming.done is None or not incoming.has_arrived or incoming.is_landing:
            return
        incoming.is_landing = True
        # P does not verify. With digests, `_land` waits for the result of CheckDigest.
        if incoming.done.digest is None:
            self._land(incoming)
            return
        # The blocks before these are digested already, by DigestBlocks while others were written.
        rest = incoming.block_ids[incoming.num_written :]
        self._actions.append(CheckDigest(incoming.order.handoff_id, rest, incoming.done.digest))

    def _land(self, incoming: IncomingHandoff) -> None:
        if incoming.staged is not None:
            self._actions.append(ConvertStaged(incoming.staged))
        else:
            self._report_landed(incoming)

    def awaits_conversion(self, handoff_id: HandoffId) -> bool:
        """Return whether a receive still needs its ConvertStaged: its link can have been cut."""
        incoming = self._incoming.get(handoff_id)
        return incoming is not None and incoming.state is IncomingState.GRANTED

    def converted(self, handoff_id: HandoffId) -> None:
        """Handle the end of ConvertStaged: the blocks of the order are valid now."""
        self._report_landed(self._incoming[handoff_id])

    def _report_landed(self, incoming: IncomingHandoff) -> None:
        done = incoming.done
        if done is None:
            raise RuntimeError(f"{incoming.order.handoff_id} cannot land: no Done from P")
        self._end(incoming)
        self._landed.append(Landed(done.handoff_id, done.num_tokens, done.first_token))
        self._grant_waiting()

    def _fail(self, incoming: IncomingHandoff, reason: str, now: float) -> None:
        self._report_failed(incoming, reason)
        self._fence(incoming, now)

    def _fence(self, incoming: IncomingHandoff, now: float) -> None:
        incoming.fence(now)
        # Two-sided, the end of the cancel ends the fence; one-sided, the reply to RevokeGrant does.
        self._actions.append(CancelWrites(incoming.link_id, incoming.ticket))
        self._send_message(
            incoming.link_id, RevokeGrant(incoming.order.handoff_id, incoming.ticket)
        )

    def _report_failed(self, incoming: IncomingHandoff, reason: str) -> None:
        self._failed.append(Lost(incoming.order.handoff_id, reason))
        self._report_proved(incoming)

    def _report_proved(self, incoming: IncomingHandoff) -> None:
        if incoming.num_proved:
            self._proved.append(Proved(incoming.order.handoff_id, incoming.num_proved))

    def _refuse(self, incoming: IncomingHandoff, reason: str) -> None:
        """End a receive that can never be staged. It had no room, so that others get none by it."""
        self._report_failed(incoming, reason)
        self._end(incoming)
        self._released.append(incoming.order.handoff_id)

    def _release(self, incoming: IncomingHandoff) -> None:
        self._end(incoming)
        self._released.append(incoming.order.handoff_id)
        self._grant_waiting()

    def _end(self, incoming: IncomingHandoff) -> None:
        incoming.move(IncomingState.ENDED)
        del self._incoming[incoming.order.handoff_id]
        del self._links[incoming.link_id].incoming[incoming.order.handoff_id]
        self._incoming_by_ticket.pop(incoming.ticket, None)
        if self._staging is not None:
            # Not earlier than this: while a receive is fenced, P may still write to its area.
            self._staging.take_back(incoming.order.handoff_id)

    def _forget_if_unused(self, link_id: LinkId) -> None:
        link = self._links[link_id]
        if link.is_cut and not link.incoming:
            del self._links[link_id]

    # --- Lookups ---------------------------------------------------------------------------

    def _get_link(self, link_id: LinkId, now: float) -> SenderLink:
        return self._links.setdefault(link_id, SenderLink(self._config, waiting_since_s=now))

    def _find_by_ticket(self, link_id: LinkId, ticket: int) -> IncomingHandoff | None:
        incoming = self._incoming_by_ticket.get(ticket)
        return incoming if incoming is not None and incoming.link_id == link_id else None

    def _send_message(self, link_id: LinkId, message: LinkMessage) -> None:
        self._actions.append(SendMessage(link_id, message))
