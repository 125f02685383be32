"""One receive of D: the states it can be in, and the moves between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kv_transfer.link import LinkId
from kv_transfer.messages import Done
from kv_transfer.types import Receive


class IncomingState(Enum):
    WAITING = "waiting"  # for the link; P knows nothing of it
    GRANTED = "granted"  # P may write
    FENCED = "fenced"  # P may not write, but a write may still land
    ENDED = "ended"


_MOVES = {
    IncomingState.WAITING: {IncomingState.GRANTED, IncomingState.ENDED},
    IncomingState.GRANTED: {IncomingState.FENCED, IncomingState.ENDED},
    IncomingState.FENCED: {IncomingState.ENDED},
    IncomingState.ENDED: set(),
}


@dataclass(slots=True)
class Incoming:
    """One receive. Only the Receiver changes it."""

    order: Receive
    link_id: LinkId
    began_s: float
    state: IncomingState = IncomingState.WAITING
    ticket: int = 0
    fenced_s: float = 0.0
    is_writing: bool = False  # P said that bytes are on their way
    num_written: int = 0  # of its blocks, from the first on
    has_arrived: bool = False
    done: Done | None = None

    def move(self, state: IncomingState) -> None:
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"{self.order.handoff_id}: {self.state} cannot become {state}")
        self.state = state
