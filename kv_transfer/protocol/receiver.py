"""Receiver state machine: ownership of the blocks that D grants to prefill nodes.

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
from dataclasses import dataclass, field

from kv_transfer.config import ReceiverConfig
from kv_transfer.link import LinkId
from kv_transfer.protocol.actions import (
    BreakLink,
    CancelWrites,
    CheckDigest,
    DigestLanded,
    ExpectWrites,
    ReceiverAction,
    SendMessage,
)
from kv_transfer.protocol.incoming import IncomingHandoff, IncomingState
from kv_transfer.protocol.messages import (
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
from kv_transfer.types import HandoffId, KvReports, Landed, Lost, Receive


@dataclass(slots=True)
class _SenderLink:
    """State of one link to a prefill node."""

    waiting_since_s: float  # start of the current period with outstanding hand-offs
    renew_s: float  # when the next Renew is due
    is_up: bool = False
    is_cut: bool = False  # the local end of the data path is destroyed
    last_message_s: float = 0.0
    handoff_ids: dict[HandoffId, None] = field(default_factory=dict)  # oldest first


class Receiver:
    def __init__(
        self,
        config: ReceiverConfig,
        *,
        is_one_sided: bool,
    ) -> None:
        self._config = config
        self._is_one_sided = is_one_sided
        self._incoming: dict[HandoffId, IncomingHandoff] = {}
        self._links: dict[LinkId, _SenderLink] = {}
        self._handoff_by_ticket: dict[int, HandoffId] = {}
        self._num_tickets = 0
        self._actions: list[ReceiverAction] = []
        self._landed: list[Landed] = []
        self._failed: list[Lost] = []
        self._released: list[HandoffId] = []
        self.num_dropped = 0  # messages and events of unknown hand-offs

    # --- Orders of the scheduler -------------------------------------------------------

    def receive(self, order: Receive, link_id: LinkId, now: float) -> None:
        """Grant these blocks to the peer, now or when the link comes up."""
        if order.handoff_id in self._incoming:
            raise ValueError(f"{order.handoff_id} is being received already")
        link = self._get_link(link_id, now)
        if not link.handoff_ids:
            link.waiting_since_s = now
        link.handoff_ids[order.handoff_id] = None
        incoming = IncomingHandoff(order, link_id, began_s=now)
        self._incoming[order.handoff_id] = incoming
        if link.is_up:
            self._grant(incoming)

    def revoke(self, handoff_id: HandoffId, now: float) -> None:
        """Cancel a receive to get its blocks back. Ignored if it has ended or is fenced already."""
        self._failed = [lost for lost in self._failed if lost.handoff_id != handoff_id]
        incoming = self._incoming.get(handoff_id)
        if incoming is None:
            return
        if incoming.state is IncomingState.WAITING:
            self._release(incoming)
        elif incoming.state is IncomingState.GRANTED:
            self._fence(incoming, now)

    # --- Events of the control link ----------------------------------------------------

    def link_up(self, link_id: LinkId, now: float) -> None:
        """Mark the link as up, after compatible Hellos in both directions, and send its grants."""
        link = self._get_link(link_id, now)
        if link.is_up or link.is_cut:
            return
        link.is_up = True
        link.last_message_s = now
        link.renew_s = now + self._config.renew_every_s
        for incoming in self._incoming_on(link):
            self._grant(incoming)

    def hear(self, link_id: LinkId, message: LinkMessage, now: float) -> None:
        """Handle a message of P. Drop and count it if it names no receive of this link."""
        link = self._links.get(link_id)
        is_sign_of_life = isinstance(message, Renewed)
        if link is None or link.is_cut or not (link.is_up or is_sign_of_life):
            self.num_dropped += 1
            return
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
            self._fail(incoming, f"prefill node: {message.reason}", now)
        elif isinstance(message, Done) and is_granted and incoming.done is None:
            incoming.done = message
            self._land_if_complete(incoming)
        elif isinstance(message, Revoked) and not is_granted and self._is_one_sided:
            self._release(incoming)
        else:
            self.num_dropped += 1

    def _handle_writing(self, incoming: IncomingHandoff, writing: Writing) -> None:
        incoming.is_writing = True
        # Two-sided, P only knows what it has sent; the transport reports what has landed.
        if self._is_one_sided:
            self._digest_early(incoming, writing.num_written)

    def _digest_early(self, incoming: IncomingHandoff, num_written: int) -> None:
        landed = incoming.order.block_ids[incoming.num_written : num_written]
        if landed and incoming.state is IncomingState.GRANTED:
            incoming.num_written += len(landed)
            self._actions.append(DigestLanded(incoming.order.handoff_id, landed))

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
        for incoming in self._incoming_on(link):
            if incoming.state is IncomingState.GRANTED:
                self._report_failed(incoming, reason)
                incoming.move(IncomingState.FENCED)
                incoming.fenced_s = now
            elif incoming.state is IncomingState.WAITING:
                self._report_failed(incoming, reason)
                self._release(incoming)
                continue
            if writes_stopped:
                self._release(incoming)
        self._forget_if_unused(link_id)

    def handle_peer_cut(self, link_id: LinkId) -> None:
        """Release fenced blocks: P's end is destroyed, or P is dead. Requires `handle_link_cut`."""
        link = self._links.get(link_id)
        if link is not None and link.is_cut:
            for incoming in self._incoming_on(link):
                self._release(incoming)
            self._forget_if_unused(link_id)

    # --- Events of the data path -------------------------------------------------------

    def arrived(self, link_id: LinkId, ticket: int, done: Done | None = None) -> None:
        """Record that all data of a grant has landed; one-sided transports pass P's Done along."""
        incoming = self._find_by_ticket(link_id, ticket)
        is_matching = done is None or (incoming and done.handoff_id == incoming.order.handoff_id)
        if incoming is None or not is_matching:
            self.num_dropped += 1
            return
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
            self._report_failed(
                incoming, "digest mismatch: the received bytes differ from those sent"
            )
            self._release(incoming)

    # --- Time ----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Send renewals that are due, and fail receives and links past their deadline."""
        for incoming in list(self._incoming.values()):
            if incoming.state is IncomingState.GRANTED and now >= self._give_up_s(incoming):
                self._fail(incoming, f"gave up after {self._config.give_up_s:g} s", now)
        for link_id, link in list(self._links.items()):
            if link.is_cut or not link.handoff_ids:
                continue
            self._renew_if_due(link_id, link, now)
            reason = self._break_reason(link, now)
            if reason is not None:
                self._actions.append(BreakLink(link_id, reason))

    def next_tick_s(self) -> float | None:
        """Return the time at which `tick` is due next, unless another event comes first."""
        times: list[float] = []
        for link in self._links.values():
            if not link.is_cut and link.handoff_ids:
                times += [self._silence_deadline_s(link), link.renew_s]
                times += [self._deadline_s(incoming) for incoming in self._incoming_on(link)]
        return min(times, default=None)

    def _deadline_s(self, incoming: IncomingHandoff) -> float:
        if incoming.state is IncomingState.FENCED:
            return incoming.fenced_s + self._config.fence_age_s
        return self._give_up_s(incoming)

    def _give_up_s(self, incoming: IncomingHandoff) -> float:
        return incoming.began_s + self._config.give_up_s

    def _silence_deadline_s(self, link: _SenderLink) -> float:
        return max(link.waiting_since_s, link.last_message_s) + self._config.silence_s

    def _renew_if_due(self, link_id: LinkId, link: _SenderLink, now: float) -> None:
        if now < link.renew_s:
            return
        link.renew_s = now + self._config.renew_every_s
        self._send_message(link_id, self._make_renew(link))

    def _make_renew(self, link: _SenderLink) -> Renew:
        """Return a Renew for a link. Without live grants it still requests a sign of life."""
        granted = [
            i.order.handoff_id for i in self._incoming_on(link) if i.state is IncomingState.GRANTED
        ]
        return Renew(tuple(granted), self._config.lease_s)

    def _break_reason(self, link: _SenderLink, now: float) -> str | None:
        if now >= self._silence_deadline_s(link):
            return f"the prefill node sent nothing for {self._config.silence_s:g} s"
        age_s = self._config.fence_age_s
        if not link.is_up and now >= link.waiting_since_s + age_s:
            return f"the prefill node is alive but did not reply to Hello within {age_s:g} s"
        for incoming in self._incoming_on(link):
            if incoming.state is IncomingState.FENCED and now >= self._deadline_s(incoming):
                return f"no reply to the revoke of {incoming.order.handoff_id} in {age_s:g} s"
        return None

    # --- Output for the KV worker --------------------------------------------------------

    def take_actions(self) -> list[ReceiverAction]:
        actions, self._actions = self._actions, []
        return actions

    def take_reports(self) -> KvReports:
        landed, lost, released = tuple(self._landed), tuple(self._failed), tuple(self._released)
        self._landed, self._failed, self._released = [], [], []
        return KvReports(landed, lost, released)

    def incoming(self) -> Iterator[IncomingHandoff]:
        """Iterate over the receives that have not ended."""
        return iter(self._incoming.values())

    def renewals(self) -> tuple[tuple[LinkId, Renew], ...]:
        """Return the keep-alives that other threads can send while the engine thread is busy."""
        return tuple(
            (link_id, self._make_renew(link))
            for link_id, link in self._links.items()
            if link.handoff_ids and not link.is_cut
        )

    def has_fenced_blocks(self, link_id: LinkId) -> bool:
        """Return whether blocks of a cut link are fenced until the peer's end is destroyed."""
        return link_id in self._links

    # --- Transitions -----------------------------------------------------------------------

    def _grant(self, incoming: IncomingHandoff) -> None:
        self._num_tickets += 1
        incoming.ticket = self._num_tickets
        incoming.move(IncomingState.GRANTED)
        order = incoming.order
        self._handoff_by_ticket[incoming.ticket] = order.handoff_id
        self._actions.append(ExpectWrites(incoming.link_id, incoming.ticket, order.block_ids))
        self._send_message(
            incoming.link_id,
            Grant(
                order.handoff_id,
                incoming.ticket,
                order.first_block,
                order.block_ids,
                self._config.lease_s,
            ),
        )

    def _land_if_complete(self, incoming: IncomingHandoff) -> None:
        if incoming.done is None or not incoming.has_arrived:
            return
        if incoming.done.digest is None:
            self._land(incoming)
            return
        order = incoming.order
        rest = order.block_ids[incoming.num_written :]
        self._actions.append(CheckDigest(order.handoff_id, rest, incoming.done.digest))

    def _land(self, incoming: IncomingHandoff) -> None:
        done = incoming.done
        if done is None:
            raise RuntimeError(f"{incoming.order.handoff_id} cannot land: no Done from P")
        self._end(incoming)
        self._landed.append(Landed(done.handoff_id, done.num_tokens, done.first_token))

    def _fail(self, incoming: IncomingHandoff, reason: str, now: float) -> None:
        self._report_failed(incoming, reason)
        self._fence(incoming, now)

    def _fence(self, incoming: IncomingHandoff, now: float) -> None:
        incoming.move(IncomingState.FENCED)
        incoming.fenced_s = now
        self._actions.append(CancelWrites(incoming.link_id, incoming.ticket))
        self._send_message(
            incoming.link_id, RevokeGrant(incoming.order.handoff_id, incoming.ticket)
        )

    def _report_failed(self, incoming: IncomingHandoff, reason: str) -> None:
        self._failed.append(Lost(incoming.order.handoff_id, reason))

    def _release(self, incoming: IncomingHandoff) -> None:
        self._end(incoming)
        self._released.append(incoming.order.handoff_id)

    def _end(self, incoming: IncomingHandoff) -> None:
        incoming.move(IncomingState.ENDED)
        del self._incoming[incoming.order.handoff_id]
        self._links[incoming.link_id].handoff_ids.pop(incoming.order.handoff_id)
        self._handoff_by_ticket.pop(incoming.ticket, None)

    def _forget_if_unused(self, link_id: LinkId) -> None:
        link = self._links[link_id]
        if link.is_cut and not link.handoff_ids:
            del self._links[link_id]

    # --- Lookups ---------------------------------------------------------------------------

    def _get_link(self, link_id: LinkId, now: float) -> _SenderLink:
        link = _SenderLink(waiting_since_s=now, renew_s=now + self._config.renew_every_s)
        return self._links.setdefault(link_id, link)

    def _incoming_on(self, link: _SenderLink) -> list[IncomingHandoff]:
        return [self._incoming[handoff_id] for handoff_id in link.handoff_ids]

    def _find_by_ticket(self, link_id: LinkId, ticket: int) -> IncomingHandoff | None:
        handoff_id = self._handoff_by_ticket.get(ticket)
        incoming = self._incoming[handoff_id] if handoff_id is not None else None
        return incoming if incoming is not None and incoming.link_id == link_id else None

    def _send_message(self, link_id: LinkId, message: LinkMessage) -> None:
        self._actions.append(SendMessage(link_id, message))
