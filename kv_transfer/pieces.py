"""What of a send to write next: whole blocks that are computed, or layers of those that come.

Pure arithmetic over an Outgoing and its grant; the Sender asks, and posts what it is told.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.messages import Grant
from kv_transfer.outgoing import Outgoing, Sliced
from kv_transfer.spans import part_of
from kv_transfer.transport import LayerRange
from kv_transfer.types import BlockId


@dataclass(frozen=True, slots=True)
class Piece:
    """The same part of some neighbouring blocks of a grant."""

    places: range  # in the grant
    layers: LayerRange | None  # None: all of them
    num_bytes: int  # 0: all of these blocks had been written before, layer by layer
    completed: tuple[BlockId, ...]  # source blocks of which nothing is left to post


class Pieces:
    def __init__(self, block_bytes: int, num_layers: int, max_write_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._num_layers = num_layers
        self._max_write_bytes = max(block_bytes, max_write_bytes)

    def take_next(self, outgoing: Outgoing, grant: Grant, room_bytes: int) -> Piece | None:
        """The next piece, from now on counted as posted; None if that is all for now."""
        room_bytes = min(room_bytes, self._max_write_bytes)
        return self._blocks(outgoing, grant, room_bytes) or self._layers(
            outgoing, grant, room_bytes
        )

    def num_ready(self, outgoing: Outgoing, grant: Grant) -> int:
        """How many of the grant's blocks are computed."""
        computed = outgoing.first_block + len(outgoing.blocks) - grant.first_block
        return min(computed, len(grant.block_ids)) if outgoing.blocks else 0

    def _blocks(self, outgoing: Outgoing, grant: Grant, room_bytes: int) -> Piece | None:
        """Computed blocks, or what is missing of them."""
        first, end = outgoing.num_posted, self.num_ready(outgoing, grant)
        layers, sliced = None, outgoing.sliced
        if sliced is not None:
            end = min(end, sliced.end)
            layers = LayerRange(sliced.num_layers, self._num_layers, self._num_layers)
        part_bytes = len(part_of(self._block_bytes, layers))
        if part_bytes:
            end = min(end, first + room_bytes // part_bytes)
        if first >= end:
            return None
        outgoing.num_posted = end
        if sliced is not None and end >= sliced.end:
            outgoing.sliced = None
        start = grant.first_block - outgoing.first_block
        completed = tuple(outgoing.blocks[start + first : start + end])
        return Piece(range(first, end), layers, (end - first) * part_bytes, completed)

    def _layers(self, outgoing: Outgoing, grant: Grant, room_bytes: int) -> Piece | None:
        """The layers that have ended of the blocks that are coming, after all the others."""
        start = outgoing.first_block + len(outgoing.blocks) - grant.first_block
        first = max(start, 0)
        end = min(start + len(outgoing.coming), len(grant.block_ids))
        if first >= end or outgoing.num_posted < first:
            return None
        posted = outgoing.sliced.num_layers if outgoing.sliced is not None else 0
        layer_bytes = (end - first) * (self._block_bytes // self._num_layers)
        ended = min(outgoing.num_layers_ended, posted + room_bytes // layer_bytes)
        if ended <= posted:
            return None
        outgoing.sliced = Sliced(first, end, ended)
        layers = LayerRange(posted, ended, self._num_layers)
        return Piece(range(first, end), layers, (ended - posted) * layer_bytes, ())
