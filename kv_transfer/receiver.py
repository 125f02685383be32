"""D's side of every hand-off: who may write which blocks, and when they are safe again.

Pure: events and the time go in, actions and reports come out. A receive moves

    WAITING ──link up──▶ GRANTED ──Done and data arrived──▶ (landed)
       │                    │ revoked, failed, silent, cut off
       ▼                    ▼
    (released)           FENCED ──nothing can land any more──▶ (released)

Time never ends a fence. It ends when P says that nothing of it is in flight (one-sided), when
the posted receives are gone (two-sided), or when the data path is destroyed: D's end of it, and
P's as well where P reaches into D's memory by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kv_transfer.actions import (
    Break,
    CancelExpected,
    CheckDigest,
    DigestEarly,
    Expect,
    ReceiverAction,
    Say,
)
from kv_transfer.config import ReceiverConfig
from kv_transfer.incoming import Incoming, IncomingState
from kv_transfer.link import LinkId
from kv_transfer.messages import (
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
class _Pair:
    """What is known of one link to a P."""

    asked_s: float  # since when something has been outstanding
    renew_s: float  # when to ask for a sign of life again
    is_up: bool = False
    is_cut: bool = False  # our end of the data path is destroyed
    heard_s: float = 0.0
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
        self._incoming: dict[HandoffId, Incoming] = {}
        self._pairs: dict[LinkId, _Pair] = {}
        self._handoff_by_ticket: dict[int, HandoffId] = {}
        self._num_tickets = 0
        self._actions: list[ReceiverAction] = []
        self._landed: list[Landed] = []
        self._lost: list[Lost] = []
        self._released: list[HandoffId] = []
        self.num_dropped = 0  # messages and events that named nothing known

    # --- Orders of the scheduler -------------------------------------------------------

    def receive(self, order: Receive, link_id: LinkId, now: float) -> None:
        """Let the peer at the other end of the link write these blocks, once it is up."""
        if order.handoff_id in self._incoming:
            raise ValueError(f"{order.handoff_id} is being received already")
        pair = self._met(link_id, now)
        if not pair.handoff_ids:
            pair.asked_s = now
        pair.handoff_ids[order.handoff_id] = None
        incoming = Incoming(order, link_id, began_s=now)
        self._incoming[order.handoff_id] = incoming
        if pair.is_up:
            self._grant(incoming)

    def revoke(self, handoff_id: HandoffId, now: float) -> None:
        """Its blocks are wanted back. Ignored if it has ended, or if it is failing anyway."""
        self._lost = [lost for lost in self._lost if lost.handoff_id != handoff_id]
        incoming = self._incoming.get(handoff_id)
        if incoming is None:
            return
        if incoming.state is IncomingState.WAITING:
            self._release(incoming)
        elif incoming.state is IncomingState.GRANTED:
            self._fence(incoming, now)

    # --- What happens on the link ------------------------------------------------------

    def link_up(self, link_id: LinkId, now: float) -> None:
        """Hello has been said on both sides and the pair may work together."""
        pair = self._met(link_id, now)
        if pair.is_up or pair.is_cut:
            return
        pair.is_up = True
        pair.heard_s = now
        pair.renew_s = now + self._config.renew_every_s
        for incoming in self._of(pair):
            self._grant(incoming)

    def hear(self, link_id: LinkId, message: LinkMessage, now: float) -> None:
        """A message of P. What names no receive of this very link is dropped and counted."""
        pair = self._pairs.get(link_id)
        is_sign_of_life = isinstance(message, Renewed)
        if pair is None or pair.is_cut or not (pair.is_up or is_sign_of_life):
            self.num_dropped += 1
            return
        pair.heard_s = now
        if is_sign_of_life:
            return
        if not isinstance(message, Done | Failed | Revoked | Writing):
            self.num_dropped += 1
            return
        incoming = self._incoming.get(message.handoff_id)
        if incoming is None or incoming.link_id != link_id:
            # A doorbell that the data overtook is as it should be.
            self.num_dropped += not isinstance(message, Writing)
            return
        self._hear_of(incoming, message, now)

    def _hear_of(
        self, incoming: Incoming, message: Done | Failed | Revoked | Writing, now: float
    ) -> None:
        is_granted = incoming.state is IncomingState.GRANTED
        if isinstance(message, Writing):
            self._hear_writing(incoming, message)
        elif isinstance(message, Failed) and is_granted:
            self._lose(incoming, f"prefill node: {message.reason}", now)
        elif isinstance(message, Done) and is_granted and incoming.done is None:
            incoming.done = message
            self._land_if_complete(incoming)
        elif isinstance(message, Revoked) and not is_granted and self._is_one_sided:
            self._release(incoming)
        else:
            self.num_dropped += 1

    def _hear_writing(self, incoming: Incoming, writing: Writing) -> None:
        incoming.is_writing = True
        # Two-sided, P knows only that it sent them, and D sees by itself what has come.
        if self._is_one_sided:
            self._digest_early(incoming, writing.num_written)

    def _digest_early(self, incoming: Incoming, num_written: int) -> None:
        landed = incoming.order.block_ids[incoming.num_written : num_written]
        if landed and incoming.state is IncomingState.GRANTED:
            incoming.num_written += len(landed)
            self._actions.append(DigestEarly(incoming.order.handoff_id, landed))

    def link_cut(self, link_id: LinkId, reason: str, now: float, *, writes_stopped: bool) -> None:
        """Our end of the pair's data path is destroyed, which may be all it takes, or not."""
        pair = self._pairs.get(link_id)
        if pair is None or pair.is_cut:
            return
        pair.is_cut = True
        for incoming in self._of(pair):
            if incoming.state is IncomingState.GRANTED:
                self._report_lost(incoming, reason)
                incoming.move(IncomingState.FENCED)
                incoming.fenced_s = now
            elif incoming.state is IncomingState.WAITING:
                self._report_lost(incoming, reason)
                self._release(incoming)
                continue
            if writes_stopped:
                self._release(incoming)
        self._forget_if_over(link_id)

    def peer_cut(self, link_id: LinkId) -> None:
        """P's end is destroyed too, or P is gone. Counts only after `link_cut`."""
        pair = self._pairs.get(link_id)
        if pair is not None and pair.is_cut:
            for incoming in self._of(pair):
                self._release(incoming)
            self._forget_if_over(link_id)

    # --- What happens on the data path -------------------------------------------------

    def arrived(self, link_id: LinkId, ticket: int, done: Done | None = None) -> None:
        """All of this grant is here; one-sided, P's Done has come with it."""
        incoming = self._by_ticket(link_id, ticket)
        is_meant = done is None or (incoming and done.handoff_id == incoming.order.handoff_id)
        if incoming is None or not is_meant:
            self.num_dropped += 1
            return
        incoming.has_arrived = True
        incoming.done = incoming.done or done
        if incoming.state is IncomingState.GRANTED:
            self._land_if_complete(incoming)

    def landing(self, link_id: LinkId, ticket: int, num_blocks: int) -> None:
        """So many of its blocks are complete, and more are to come."""
        incoming = self._by_ticket(link_id, ticket)
        if incoming is not None:
            self._digest_early(incoming, num_blocks)

    def quieted(self, link_id: LinkId, ticket: int) -> None:
        incoming = self._by_ticket(link_id, ticket)
        if incoming is None or incoming.state is not IncomingState.FENCED:
            self.num_dropped += 1
            return
        self._release(incoming)

    def checked(self, handoff_id: HandoffId, *, is_good: bool) -> None:
        """The answer to CheckDigest. All writes have ended, so a bad one needs no fence."""
        incoming = self._incoming.get(handoff_id)
        if incoming is None or incoming.state is not IncomingState.GRANTED:
            self.num_dropped += 1
        elif is_good:
            self._land(incoming)
        else:
            self._report_lost(incoming, "digest mismatch: the bytes are not those that were sent")
            self._release(incoming)

    # --- Time ----------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Renew what is wanted, and give up what is past its time."""
        for incoming in list(self._incoming.values()):
            if incoming.state is IncomingState.GRANTED and now >= self._give_up_at(incoming):
                self._lose(incoming, f"gave up after {self._config.give_up_s:g} s", now)
        for link_id, pair in list(self._pairs.items()):
            if pair.is_cut or not pair.handoff_ids:
                continue
            self._renew(link_id, pair, now)
            reason = self._why_broken(pair, now)
            if reason is not None:
                self._actions.append(Break(link_id, reason))

    def next_tick_s(self) -> float | None:
        """When `tick` has something to do next, if nothing else happens."""
        times: list[float] = []
        for pair in self._pairs.values():
            if not pair.is_cut and pair.handoff_ids:
                times += [self._silent_at(pair), pair.renew_s]
                times += [self._ends_at(one) for one in self._of(pair)]
        return min(times, default=None)

    def _ends_at(self, incoming: Incoming) -> float:
        if incoming.state is IncomingState.FENCED:
            return incoming.fenced_s + self._config.fence_age_s
        return self._give_up_at(incoming)

    def _give_up_at(self, incoming: Incoming) -> float:
        return incoming.began_s + self._config.give_up_s

    def _silent_at(self, pair: _Pair) -> float:
        return max(pair.asked_s, pair.heard_s) + self._config.silence_s

    def _renew(self, link_id: LinkId, pair: _Pair, now: float) -> None:
        if now < pair.renew_s:
            return
        pair.renew_s = now + self._config.renew_every_s
        self._say(link_id, self._renewal(pair))

    def _renewal(self, pair: _Pair) -> Renew:
        """Asks for a sign of life, also where nothing is granted yet, or all of it is fenced."""
        granted = [i.order.handoff_id for i in self._of(pair) if i.state is IncomingState.GRANTED]
        return Renew(tuple(granted), self._config.lease_s)

    def _why_broken(self, pair: _Pair, now: float) -> str | None:
        if now >= self._silent_at(pair):
            return f"the prefill node said nothing for {self._config.silence_s:g} s"
        age_s = self._config.fence_age_s
        if not pair.is_up and now >= pair.asked_s + age_s:
            return f"the prefill node lives and did not answer our Hello in {age_s:g} s"
        for incoming in self._of(pair):
            if incoming.state is IncomingState.FENCED and now >= self._ends_at(incoming):
                return f"{incoming.order.handoff_id} was revoked {age_s:g} s ago, unanswered"
        return None

    # --- What the worker half takes out --------------------------------------------------

    def take_actions(self) -> list[ReceiverAction]:
        actions, self._actions = self._actions, []
        return actions

    def take_reports(self) -> KvReports:
        landed, lost, released = tuple(self._landed), tuple(self._lost), tuple(self._released)
        self._landed, self._lost, self._released = [], [], []
        return KvReports(landed, lost, released)

    def incoming(self) -> Iterator[Incoming]:
        """The receives that have not ended, for those who look."""
        return iter(self._incoming.values())

    def renewals(self) -> tuple[tuple[LinkId, Renew], ...]:
        """What another thread may say for us while we are away: everything is as it was."""
        return tuple(
            (link_id, self._renewal(pair))
            for link_id, pair in self._pairs.items()
            if pair.handoff_ids and not pair.is_cut
        )

    def has_fenced(self, link_id: LinkId) -> bool:
        """Whether blocks of this link wait for the peer's end to be destroyed."""
        return link_id in self._pairs

    # --- Moves -----------------------------------------------------------------------------

    def _grant(self, incoming: Incoming) -> None:
        self._num_tickets += 1
        incoming.ticket = self._num_tickets
        incoming.move(IncomingState.GRANTED)
        order = incoming.order
        self._handoff_by_ticket[incoming.ticket] = order.handoff_id
        self._actions.append(Expect(incoming.link_id, incoming.ticket, order.block_ids))
        self._say(
            incoming.link_id,
            Grant(
                order.handoff_id,
                incoming.ticket,
                order.first_block,
                order.block_ids,
                self._config.lease_s,
            ),
        )

    def _land_if_complete(self, incoming: Incoming) -> None:
        if incoming.done is None or not incoming.has_arrived:
            return
        if incoming.done.digest is None:
            self._land(incoming)
            return
        order = incoming.order
        rest = order.block_ids[incoming.num_written :]
        self._actions.append(CheckDigest(order.handoff_id, rest, incoming.done.digest))

    def _land(self, incoming: Incoming) -> None:
        done = incoming.done
        if done is None:
            raise RuntimeError(f"{incoming.order.handoff_id} cannot land: P is not done")
        self._end(incoming)
        self._landed.append(Landed(done.handoff_id, done.num_tokens, done.first_token))

    def _lose(self, incoming: Incoming, reason: str, now: float) -> None:
        self._report_lost(incoming, reason)
        self._fence(incoming, now)

    def _fence(self, incoming: Incoming, now: float) -> None:
        incoming.move(IncomingState.FENCED)
        incoming.fenced_s = now
        self._actions.append(CancelExpected(incoming.link_id, incoming.ticket))
        self._say(incoming.link_id, RevokeGrant(incoming.order.handoff_id, incoming.ticket))

    def _report_lost(self, incoming: Incoming, reason: str) -> None:
        self._lost.append(Lost(incoming.order.handoff_id, reason))

    def _release(self, incoming: Incoming) -> None:
        self._end(incoming)
        self._released.append(incoming.order.handoff_id)

    def _end(self, incoming: Incoming) -> None:
        incoming.move(IncomingState.ENDED)
        del self._incoming[incoming.order.handoff_id]
        self._pairs[incoming.link_id].handoff_ids.pop(incoming.order.handoff_id)
        self._handoff_by_ticket.pop(incoming.ticket, None)

    def _forget_if_over(self, link_id: LinkId) -> None:
        pair = self._pairs[link_id]
        if pair.is_cut and not pair.handoff_ids:
            del self._pairs[link_id]

    # --- Lookups ---------------------------------------------------------------------------

    def _met(self, link_id: LinkId, now: float) -> _Pair:
        pair = _Pair(asked_s=now, renew_s=now + self._config.renew_every_s)
        return self._pairs.setdefault(link_id, pair)

    def _of(self, pair: _Pair) -> list[Incoming]:
        return [self._incoming[handoff_id] for handoff_id in pair.handoff_ids]

    def _by_ticket(self, link_id: LinkId, ticket: int) -> Incoming | None:
        handoff_id = self._handoff_by_ticket.get(ticket)
        incoming = self._incoming[handoff_id] if handoff_id is not None else None
        return incoming if incoming is not None and incoming.link_id == link_id else None

    def _say(self, link_id: LinkId, message: LinkMessage) -> None:
        self._actions.append(Say(link_id, message))
