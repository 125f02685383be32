"""Splits a send into writes: computed blocks, or computed layers of the blocks of a running pass.

Pure arithmetic over an OutgoingHandoff and its grant. The Sender posts the result.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.memory_runs import layer_bytes_range
from baton.kv_transfer.protocol.messages import Grant
from baton.kv_transfer.protocol.outgoing import OutgoingHandoff, Sliced
from baton.kv_transfer.transports.base import LayerRange


@dataclass(frozen=True, slots=True)
class WritePart:
    """Consecutive blocks of a grant, or the same layers of each of them."""

    first: int  # index of the first block in the grant
    sources: tuple[BlockId, ...]
    layers: LayerRange | None  # None: whole blocks
    num_bytes: int  # 0: all layers of these blocks have been posted before
    is_complete: bool  # all layers of these blocks are posted with this part


class WriteSplitter:
    def __init__(self, block_bytes: int, num_layers: int, max_write_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._num_layers = num_layers
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
        layers, sliced = None, outgoing.sliced
        if sliced is not None:
            end = min(end, sliced.end)
            layers = LayerRange(sliced.num_layers, self._num_layers, self._num_layers)
        part_bytes = len(layer_bytes_range(self._block_bytes, layers))
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
