"""State of one receive on D, and its allowed transitions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from baton.core.ids import BlockId
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.conversion import StagedBlocks
from baton.kv_transfer.protocol.messages import Done
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
    staged: StagedBlocks | None = None  # blocks that P writes, if they are converted

    @property
    def block_ids(self) -> tuple[BlockId, ...]:
        """Blocks that P writes."""
        return self.order.block_ids if self.staged is None else self.staged.block_ids

    @property
    def first_block(self) -> int:
        """Place of the first of these blocks in P's order."""
        return self.order.first_block if self.staged is None else self.staged.first_block

    def move(self, state: IncomingState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"{self.order.handoff_id}: {self.state} cannot become {state}")
        self.state = state

    def fence(self, now: float) -> None:
        self.move(IncomingState.FENCED)
        self.fenced_s = now
