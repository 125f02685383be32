"""State of one send on P, its allowed transitions, and its split into writes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.link import LinkId
from baton.kv_transfer.protocol.messages import Grant, Writing
from baton.kv_transfer.transports.base import WHOLE_BLOCK, LayerRange
from baton.kv_transfer.types import Complete, Send


class OutgoingState(Enum):
    HELD = "held"  # waits for the grant
    PUSHING = "pushing"
    ENDING = "ending"  # no further writes are posted; some may be in flight
    ENDED = "ended"


_TRANSITIONS = {
    OutgoingState.HELD: {OutgoingState.PUSHING, OutgoingState.ENDING},
    OutgoingState.PUSHING: {OutgoingState.ENDING, OutgoingState.ENDED},
    OutgoingState.ENDING: {OutgoingState.ENDED},
    OutgoingState.ENDED: set(),
}


@dataclass(slots=True)
class OutgoingHandoff:
    """State of one send. Only the Sender modifies it."""

    handoff_id: HandoffId
    state: OutgoingState = OutgoingState.HELD
    first_block: int = 0  # index of blocks[0] in the sequence's block table
    blocks: list[BlockId] = field(default_factory=list)
    is_ordered: bool = False  # the scheduler has ordered it and expects finished_sending
    has_final_order: bool = False  # the scheduler has ordered Complete or Withdraw
    complete: Complete | None = None
    held_until_s: float = math.inf
    link_id: LinkId | None = None
    grant: Grant | None = None
    lease_until_s: float = 0.0
    num_posted: int = 0  # leading blocks of the grant of which all layers are posted
    coming: tuple[BlockId, ...] = ()  # blocks after `blocks` that the current pass computes
    num_layers_ended: int = 0  # layers of `coming` that are computed
    sliced: Sliced | None = None
    in_flight: dict[int, WriteInFlight] = field(default_factory=dict)  # by write id
    reported: tuple[int, bool] | None = None  # last sent to D: `num_written`, `complete` is set
    must_answer_revoke: bool = False
    why_ended: str = ""

    @property
    def num_written(self) -> int:
        """Number of leading blocks of the grant whose writes have all completed."""
        # Writes complete in any order; D needs to know up to where nothing is missing.
        return min([self.num_posted, *(flight.first for flight in self.in_flight.values())])

    @property
    def deadline_s(self) -> float:
        """Return when this send fails unless D grants it or renews its lease."""
        if self.state is OutgoingState.PUSHING:
            return self.lease_until_s
        return self.held_until_s if self.state is OutgoingState.HELD else math.inf

    def take_progress(self) -> Writing | None:
        """Return the progress of the writes; None if it has not changed since the last call."""
        is_begun = bool(self.in_flight or self.num_posted)
        progress = self.num_written, self.complete is not None
        if self.state is not OutgoingState.PUSHING or not is_begun or self.reported == progress:
            return None
        self.reported = progress
        return Writing(self.handoff_id, self.num_written)

    def is_stuck(self, now: float, limit_s: float) -> bool:
        """Return whether a write has been in flight for `limit_s`."""
        return any(now >= flight.posted_s + limit_s for flight in self.in_flight.values())

    def check_follows(self, order: Send) -> None:
        """Raise ValueError if the blocks of an order leave a gap."""
        if not self.blocks:
            self.first_block = order.first_block
        elif order.first_block != self.first_block + len(self.blocks):
            raise ValueError(f"{self.handoff_id}: blocks do not follow those sent before")

    def move(self, state: OutgoingState) -> None:
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"{self.handoff_id}: {self.state} cannot become {state}")
        self.state = state


@dataclass(frozen=True, slots=True)
class WriteInFlight:
    posted_s: float
    num_bytes: int
    first: int  # index of its first block in the grant


@dataclass(frozen=True, slots=True)
class Sliced:
    """Blocks `first` to `end` of the grant, of which the first `num_layers` layers are posted."""

    first: int
    end: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class WritePart:
    """Consecutive blocks of a grant, or the same layers of each of them."""

    first: int  # index of the first block in the grant
    sources: tuple[BlockId, ...]
    layers: LayerRange
    num_bytes: int  # 0: all layers of these blocks have been posted before
    is_complete: bool  # all layers of these blocks are posted with this part


class WriteSplitter:
    """Splits sends into writes: computed blocks, or computed layers of the blocks of a pass."""

    def __init__(self, block_bytes: int, num_layers: int, max_write_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        # A block cannot be split except by layer, so a write has room for one at least.
        self._max_write_bytes = max(block_bytes, max_write_bytes)

    def take_next(
        self, outgoing: OutgoingHandoff, grant: Grant, room_bytes: int
    ) -> WritePart | None:
        """Return the next part and mark it as posted; None if nothing can be posted now."""
        room_bytes = min(room_bytes, self._max_write_bytes)
        return self._take_blocks(outgoing, grant, room_bytes) or self._take_layers(
            outgoing, grant, room_bytes
        )

    def num_ready(self, outgoing: OutgoingHandoff, grant: Grant) -> int:
        """Return how many leading blocks of the grant are computed."""
        computed = outgoing.first_block + len(outgoing.blocks) - grant.first_block
        return min(computed, len(grant.block_ids)) if outgoing.blocks else 0

    def _take_blocks(
        self, outgoing: OutgoingHandoff, grant: Grant, room_bytes: int
    ) -> WritePart | None:
        """Take computed blocks, or the layers of them that are not posted yet."""
        first, end = outgoing.num_posted, self.num_ready(outgoing, grant)
        layers, sliced = WHOLE_BLOCK, outgoing.sliced
        if sliced is not None:
            end = min(end, sliced.end)
            layers = LayerRange(sliced.num_layers, self._num_layers, self._num_layers)
        part_bytes = len(layers.byte_range(self._block_bytes))
        # Nothing is left to write of blocks whose layers all went out during the pass.
        if part_bytes:
            end = min(end, first + room_bytes // part_bytes)
        if first >= end:
            return None
        outgoing.num_posted = end
        if sliced is not None and end >= sliced.end:
            outgoing.sliced = None
        start = grant.first_block - outgoing.first_block
        sources = tuple(outgoing.blocks[start + first : start + end])
        return WritePart(first, sources, layers, len(sources) * part_bytes, is_complete=True)

    def _take_layers(
        self, outgoing: OutgoingHandoff, grant: Grant, room_bytes: int
    ) -> WritePart | None:
        """Take computed layers of the blocks of the current pass, after all earlier blocks."""
        start = outgoing.first_block + len(outgoing.blocks) - grant.first_block
        first = max(start, 0)
        end = min(start + len(outgoing.coming), len(grant.block_ids))
        # Earlier blocks go first: P reports its progress as a number of leading blocks.
        if first >= end or outgoing.num_posted < first:
            return None
        posted = outgoing.sliced.num_layers if outgoing.sliced is not None else 0
        layer_bytes = (end - first) * (self._block_bytes // self._num_layers)
        end_layer = min(outgoing.num_layers_ended, posted + room_bytes // layer_bytes)
        if end_layer <= posted:
            return None
        outgoing.sliced = Sliced(first, end, end_layer)
        layers = LayerRange(posted, end_layer, self._num_layers)
        sources = outgoing.coming[first - start : end - start]
        num_bytes = (end_layer - posted) * layer_bytes
        return WritePart(first, sources, layers, num_bytes, is_complete=False)
