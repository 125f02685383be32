"""Pairs whose blocks differ: which of them fit, and which of the sender's blocks a receive needs.

The receiver takes the blocks in the sender's layout into a staging area and converts them. So does
a receiver on a device that the data path cannot write, which only copies equal blocks. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.protocol.messages import MAX_REGION_BLOCKS, Fingerprint, Hello, Region
from baton.kv_transfer.types import Receive

INT8 = "int8/"  # before the dtype of the model
INT8_SCALE_BYTES = 2
NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def is_convertible(source: Fingerprint, target: Fingerprint) -> bool:
    """Return whether blocks of `source` can be converted into different ones of `target`.

    The receiver's KV can be int8 while the sender's is not. Block sizes can differ if all layers
    attend to all tokens: otherwise the two sides would not agree on the blocks that are needed.
    """
    if source == target or target.dtype not in (source.dtype, f"{INT8}{source.dtype}"):
        return False
    is_one_group = "|" not in target.kv_groups and not _forgets(target.kv_groups)
    if source.block_size != target.block_size and not is_one_group:
        return False
    return replace(source, dtype=target.dtype, block_size=target.block_size) == target


def _token_bytes(layout: Fingerprint) -> int | None:
    """Return the bytes of a token in one layer, tensor and KV head; None for an unknown dtype."""
    if layout.dtype.startswith(INT8):
        return layout.head_dim + INT8_SCALE_BYTES
    number_bytes = NUMBER_BYTES.get(layout.dtype)
    return None if number_bytes is None else number_bytes * layout.head_dim


def _has_expected_size(sender: Hello, receiver: Hello) -> bool:
    """Return whether the sender's blocks have the size that its fingerprint implies."""
    # A peer is not trusted: the conversion reads blocks of this size out of the staging area.
    source, target = sender.fingerprint, receiver.fingerprint
    sent, kept = _token_bytes(source), _token_bytes(target)
    if not sent or not kept or min(source.block_size, target.block_size) < 1:
        return False
    num_slots = receiver.region.block_bytes // (kept * target.block_size)
    return sender.region.block_bytes == num_slots * sent * source.block_size


def _forgets(kv_groups: str) -> bool:
    return kv_groups.startswith(("window", "chunk"))


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of the blocks of one sender into those of this node."""

    source: Fingerprint
    target: Fingerprint
    region: Region  # staging area, in blocks of the sender
    device: str = "cpu"  # of this node's blocks

    @classmethod
    def between(cls, sender: Hello, receiver: Hello) -> Conversion | None:
        """Return the conversion of a pair; None if it needs none or cannot have one."""
        source, target, staging = sender.fingerprint, receiver.fingerprint, receiver.staging
        block_bytes = sender.region.block_bytes
        if source == target:
            is_good = block_bytes == receiver.region.block_bytes
            is_needed = not sender.can_write(receiver)
        else:
            is_good = _has_expected_size(sender, receiver)
            is_needed = is_convertible(source, target)
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
        for name in ("dtype", "block_size"):
            sent, kept = getattr(self.source, name), getattr(self.target, name)
            if sent != kept:
                names.append(f"{name} {sent} to {kept}")
        return ", ".join(names)

    def blocks_needed(self, order: Receive) -> range:
        """Return the places, in the sender's order, of the blocks that an order needs."""
        size = self.source.block_size
        if size == self.target.block_size:
            return range(order.first_block, order.first_block + len(order.block_ids))
        if not order.block_ids:
            return range(0)
        return range(self._first_token(order) // size, -(-order.num_tokens // size))

    def num_skipped_tokens(self, order: Receive) -> int:
        """Return the leading tokens of the sender's blocks that this node has already."""
        if self.source.block_size == self.target.block_size:
            return 0
        return self._first_token(order) % self.source.block_size

    def _first_token(self, order: Receive) -> int:
        return order.first_block * self.target.block_size


def describe_copy(source: str, target: str) -> str:
    """Describe that blocks pass through other memory than that of the cache they come from."""
    return f"device {source} to {target}"


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks of a sender in the staging area, to convert into those of an order."""

    conversion: Conversion
    order: Receive
    first_block: int  # place of block_ids[0] in the sender's order
    block_ids: tuple[BlockId, ...]  # of the staging area, adjacent


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
        return len(conversion.blocks_needed(order)) <= conversion.region.num_blocks

    def lend(self, conversion: Conversion, order: Receive) -> StagedBlocks | None:
        """Return blocks for an order, or None while the others leave no room."""
        needed, size = conversion.blocks_needed(order), conversion.region.block_bytes
        first = self._find_gap(len(needed), size)
        if first is None:
            return None
        block_ids = tuple(BlockId(block_id) for block_id in range(first, first + len(needed)))
        staged = StagedBlocks(conversion, order, needed.start, block_ids)
        taken = range(first * size, (first + len(needed)) * size)
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
