"""One send of P: the states it can be in, and the moves between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kv_transfer.link import LinkId
from kv_transfer.messages import Grant
from kv_transfer.types import BlockId, Complete, HandoffId


class OutgoingState(Enum):
    HELD = "held"  # no grant yet
    PUSHING = "pushing"
    ENDING = "ending"  # nothing more is posted; writes may be in flight
    ENDED = "ended"


_MOVES = {
    OutgoingState.HELD: {OutgoingState.PUSHING, OutgoingState.ENDING},
    OutgoingState.PUSHING: {OutgoingState.ENDING, OutgoingState.ENDED},
    OutgoingState.ENDING: {OutgoingState.ENDED},
    OutgoingState.ENDED: set(),
}


@dataclass(slots=True)
class Outgoing:
    """One send. Only the Sender changes it."""

    handoff_id: HandoffId
    state: OutgoingState = OutgoingState.HELD
    first_block: int = 0  # place of blocks[0] in the sequence's block table
    blocks: list[BlockId] = field(default_factory=list)
    is_ordered: bool = False  # the scheduler has spoken of it, and awaits finished_sending
    has_last_word: bool = False  # Complete or Withdraw was ordered
    complete: Complete | None = None
    held_until_s: float | None = None
    link_id: LinkId | None = None
    grant: Grant | None = None
    lease_until_s: float = 0.0
    num_posted: int = 0  # of the grant's blocks, with all their layers
    coming: tuple[BlockId, ...] = ()  # follow `blocks`: the pass under way completes them
    num_layers_ended: int = 0  # of `coming`
    sliced: Sliced | None = None
    in_flight: dict[int, Flight] = field(default_factory=dict)  # by write id
    told: tuple[int, bool] | None = None  # D's last news: `num_written`, and whether that is all
    must_answer_revoke: bool = False
    why_ended: str = ""

    @property
    def num_written(self) -> int:
        """Of the grant's blocks, from its first on: no write of theirs is missing or in flight."""
        return min([self.num_posted, *(flight.first for flight in self.in_flight.values())])

    def move(self, state: OutgoingState) -> None:
        if state not in _MOVES[self.state]:
            raise RuntimeError(f"{self.handoff_id}: {self.state} cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class Flight:
    posted_s: float
    num_bytes: int
    first: int  # place of its first block in the grant


@dataclass(frozen=True, slots=True)
class Sliced:
    """Of the grant's blocks from `first` to `end` the first so many layers are posted."""

    first: int
    end: int
    num_layers: int
