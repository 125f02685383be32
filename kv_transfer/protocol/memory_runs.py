"""Block ids to contiguous memory runs. Pure.

The cost of a transfer depends on its number of runs, so adjacent blocks are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region


@dataclass(frozen=True, slots=True)
class BlockRun:
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockRunPair:
    """Source and target of a contiguous copy."""

    source: int
    target: int
    num_bytes: int


def spans(region: Region, block_ids: Sequence[BlockId]) -> list[BlockRun]:
    """Return the runs of these blocks, in order, adjacent blocks merged.

    Raise ValueError for an id outside the region.
    """
    merged: list[BlockRun] = []
    for block_id in block_ids:
        address = _address(region, block_id)
        if merged and merged[-1].address + merged[-1].num_bytes == address:
            merged[-1] = BlockRun(merged[-1].address, merged[-1].num_bytes + region.block_bytes)
        else:
            merged.append(BlockRun(address, region.block_bytes))
    return merged


def pair_spans(
    source: Region, source_ids: Sequence[BlockId], target: Region, target_ids: Sequence[BlockId]
) -> list[BlockRunPair]:
    """Return the copies to make, merging blocks that are adjacent on both sides."""
    if source.block_bytes != target.block_bytes:
        raise ValueError(
            f"sizes differ: blocks of {source.block_bytes} and {target.block_bytes} bytes"
        )
    merged: list[BlockRunPair] = []
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        here, there = _address(source, source_id), _address(target, target_id)
        last = merged[-1] if merged else None
        if last and (last.source + last.num_bytes, last.target + last.num_bytes) == (here, there):
            num_bytes = last.num_bytes + source.block_bytes
            merged[-1] = BlockRunPair(last.source, last.target, num_bytes)
        else:
            merged.append(BlockRunPair(here, there, source.block_bytes))
    return merged


def _address(region: Region, block_id: BlockId) -> int:
    if not 0 <= block_id < region.num_blocks:
        raise ValueError(f"block {block_id} is outside a region of {region.num_blocks} blocks")
    return region.base + block_id * region.block_bytes
