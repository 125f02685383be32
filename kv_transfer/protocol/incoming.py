"""State of the receives on D, their allowed transitions, and the link to the P that sends. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.config import ReceiverConfig
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.conversion import Conversion, StagedBlocks
from baton.kv_transfer.protocol.messages import Done, Renew
from baton.kv_transfer.types import Receive


class IncomingState(Enum):
    WAITING = "waiting"  # the link is not up yet; no Grant has been sent
    GRANTED = "granted"  # P has permission to write
    FENCED = "fenced"  # permission withdrawn, but writes in flight can still land
    ENDED = "ended"


_TRANSITIONS = {
    IncomingState.WAITING: {IncomingState.GRANTED, IncomingState.ENDED},
    IncomingState.GRANTED: {IncomingState.FENCED, IncomingState.ENDED},
    IncomingState.FENCED: {IncomingState.ENDED},
    IncomingState.ENDED: set(),
}


@dataclass(slots=True)
class IncomingHandoff:
    """State of one receive. Only the Receiver modifies it."""

    order: Receive
    link_id: LinkId
    began_s: float
    state: IncomingState = IncomingState.WAITING
    ticket: int = 0
    fenced_s: float = 0.0
    is_writing: bool = False  # P has reported bytes in flight
    num_written: int = 0  # leading blocks whose data has landed
    num_proved: int = 0  # of these, the ones whose digest is that of P
    has_arrived: bool = False
    done: Done | None = None
    is_landing: bool = False  # it is checked, and then converted, after which it has landed
    staged: StagedBlocks | None = None  # blocks that P writes, if they are converted

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """Blocks that P writes."""
        return self.order.block_ids if self.staged is None else self.staged.block_ids

    @property
    def first_block(self) -> int:
        """Place of the first of these blocks in P's order."""
        return self.order.first_block if self.staged is None else self.staged.run.source.start

    def move(self, state: IncomingState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"{self.order.handoff_id}: {self.state} cannot become {state}")
        self.state = state

    def fence(self, now: float) -> None:
        self.move(IncomingState.FENCED)
        self.fenced_s = now


@dataclass(slots=True)
class SenderLink:
    """Link from D to one P: its open receives, lease renewals and signs of life."""

    config: ReceiverConfig
    waiting_since_s: float  # start of the current period with open receives
    renew_s: float = 0.0  # when the next Renew is due
    last_message_s: float = 0.0
    is_up: bool = False
    conversion: Conversion | None = None  # of the peer's blocks
    is_cut: bool = False  # the local end of the data path is destroyed
    incoming: dict[HandoffId, IncomingHandoff] = field(default_factory=dict)  # oldest first

    def __post_init__(self) -> None:
        self.renew_s = self.waiting_since_s + self.config.renew_every_s

    @property
    def awaits_peer(self) -> bool:
        """Return whether P must give signs of life: receives are open, fenced ones included."""
        return bool(self.incoming) and not self.is_cut

    def add(self, incoming: IncomingHandoff, now: float) -> None:
        if not self.incoming:
            self.waiting_since_s = now
        self.incoming[incoming.order.handoff_id] = incoming

    def come_up(self, now: float, conversion: Conversion | None) -> None:
        self.is_up = True
        self.conversion = conversion
        self.last_message_s = now
        self.renew_s = now + self.config.renew_every_s

    def take_due_renew(self, now: float) -> Renew | None:
        if now < self.renew_s:
            return None
        self.renew_s = now + self.config.renew_every_s
        return self.make_renew()

    def make_renew(self) -> Renew:
        """Return a Renew of all live grants. Without any it still requests a sign of life."""
        granted = [
            handoff_id
            for handoff_id, incoming in self.incoming.items()
            if incoming.state is IncomingState.GRANTED
        ]
        return Renew(tuple(granted), self.config.lease_s)

    def break_reason(self, now: float) -> str | None:
        """Return why the pair must be cut; None while P is alive and answers."""
        silence_s, age_s = self.config.silence_s, self.config.fence_age_s
        # A peer from which nothing is received may be silent for ever: the time counts from the
        # first open receive on.
        if now >= max(self.waiting_since_s, self.last_message_s) + silence_s:
            return f"the peer sent nothing for {silence_s:g} s"
        # P answers renewals by a thread of its own: its engine thread may hang nevertheless.
        if not self.is_up and now >= self.waiting_since_s + age_s:
            return f"the peer is alive but did not reply to Hello within {age_s:g} s"
        for handoff_id, incoming in self.incoming.items():
            if incoming.state is IncomingState.FENCED and now >= incoming.fenced_s + age_s:
                return f"no reply to the revoke of {handoff_id} in {age_s:g} s"
        return None
