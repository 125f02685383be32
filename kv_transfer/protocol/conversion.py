"""Pairs whose blocks differ: which of them fit, and where the sender's blocks are staged.

The receiver takes the blocks in the sender's layout into a staging area and converts them. So does
a receiver on a device that the data path cannot write, which only copies equal blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.layout import NO_RUN, KvLayout, LayoutRun, StagedRun, layout_map
from baton.kv_transfer.protocol.messages import MAX_REGION_BLOCKS, Hello, Region
from baton.kv_transfer.types import Receive


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of the blocks of one sender into those of this node."""

    source: KvLayout
    target: KvLayout
    region: Region  # staging area, in blocks of the sender
    device: str = "cpu"  # of this node's blocks

    @classmethod
    def between(cls, sender: Hello, receiver: Hello) -> Conversion | None:
        """Return the conversion of a pair; None if it needs none or cannot have one."""
        source, target = sender.fingerprint.layout, receiver.fingerprint.layout
        staging, block_bytes = receiver.staging, sender.region.block_bytes
        if sender.fingerprint == receiver.fingerprint:
            is_good = block_bytes == receiver.region.block_bytes
            is_needed = not sender.can_write(receiver)
        else:
            # A peer is not trusted: blocks of this size are read out of the staging area.
            is_good = block_bytes == source.block_bytes > 0
            is_needed = sender.fingerprint.is_convertible_into(receiver.fingerprint)
        if staging is None or staging.num_bytes < block_bytes or not (is_needed and is_good):
            return None
        num_blocks = min(staging.num_bytes // block_bytes, MAX_REGION_BLOCKS)
        region = Region(staging.base, num_blocks, block_bytes, staging.device)
        return cls(source, target, region, receiver.region.device)

    @property
    def changes_layout(self) -> bool:
        """Return whether blocks differ; otherwise they are only copied to the device."""
        return self.source != self.target

    def __str__(self) -> str:
        names = []
        if self.device != self.region.device:
            names.append(describe_copy(self.region.device, self.device))
        if self.source.cache_dtype != self.target.cache_dtype:
            names.append(f"dtype {self.source.cache_dtype} to {self.target.cache_dtype}")
        if self.source.block_size != self.target.block_size:
            names.append(f"block_size {self.source.block_size} to {self.target.block_size}")
        if self.source.num_layers != self.target.num_layers:
            names.append(f"num_layers {self.source.num_layers} to {self.target.num_layers}")
        return ", ".join(names)

    def map(self, order: Receive) -> LayoutRun:
        """Return the sender's blocks that an order needs."""
        places = range(order.first_block, order.first_block + len(order.block_ids))
        runs = layout_map(self.source, self.target, places, num_tokens=order.num_tokens)
        return runs[0] if runs else NO_RUN


def describe_copy(source: str, target: str) -> str:
    """Describe that blocks pass through other memory than that of the cache they come from."""
    return f"device {source} to {target}"


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks of a sender in the staging area, to convert into those of an order."""

    conversion: Conversion
    order: Receive
    run: LayoutRun
    block_ids: tuple[BlockId, ...]  # of the staging area, adjacent, for the blocks of the run

    @property
    def staged_run(self) -> StagedRun:
        conversion, run = self.conversion, self.run
        return StagedRun(
            conversion.source,
            conversion.target,
            offset=sum(self.block_ids[:1]) * conversion.region.block_bytes,
            num_blocks=len(run.source),
            first_token=run.first_token,
            block_ids=self.order.block_ids,
        )


# Begins a conversion, which is done once the fence has passed.
ConvertBlocks = Callable[[StagedBlocks], Fence]


class StagingArea:
    """Lends adjacent blocks to receives, first fit. A block is lent until no write can land."""

    def __init__(self, region: Region, convert: ConvertBlocks) -> None:
        self.region = region
        self.convert = convert
        self._lent: dict[HandoffId, tuple[range, StagedBlocks]] = {}  # bytes of the region

    def find(self, handoff_id: HandoffId) -> StagedBlocks | None:
        lent = self._lent.get(handoff_id)
        return None if lent is None else lent[1]

    def fits(self, conversion: Conversion, order: Receive) -> bool:
        return len(conversion.map(order).source) <= conversion.region.num_blocks

    def lend(self, conversion: Conversion, order: Receive) -> StagedBlocks | None:
        """Return blocks for an order, or None while the others leave no room."""
        run, size = conversion.map(order), conversion.region.block_bytes
        num_blocks = len(run.source)
        first = self._find_gap(num_blocks, size)
        if first is None:
            return None
        block_ids = tuple(BlockId(block_id) for block_id in range(first, first + num_blocks))
        staged = StagedBlocks(conversion, order, run, block_ids)
        taken = range(first * size, (first + num_blocks) * size)
        self._lent[order.handoff_id] = taken, staged
        return staged

    def take_back(self, handoff_id: HandoffId) -> bool:
        """Return whether the hand-off had blocks."""
        return self._lent.pop(handoff_id, None) is not None

    def _find_gap(self, num_blocks: int, size: int) -> int | None:
        """Return the first block of the first gap that is large enough."""
        first = 0
        for taken in sorted((taken for taken, _ in self._lent.values()), key=lambda it: it.start):
            if (first + num_blocks) * size <= taken.start:
                break
            # A multiple of the size: an id times the size must be the address, as in any region.
            first = max(first, -(-taken.stop // size))
        return first if (first + num_blocks) * size <= self.region.num_bytes else None
