"""Message format of writes over UCXX. Pure.

A message is either a run, contiguous bytes whose tag holds their offset in the grant, or a parcel,
many small runs packed together whose header holds their place. A message has a fixed cost, mostly
Python time on both sides, that equals copying a few hundred KiB. So small runs are packed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.memory_runs import BlockRun, pair_spans, spans
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import LayerRange, Write
from baton.kv_transfer.transports.staging import SLOT_BYTES

MAX_PARCEL_RUN_BYTES = 256 << 10  # average run size below which runs are packed into parcels
MAX_RUN_BYTES = 1 << 20  # per message, unless a block is larger
HEADER_BYTES = 64
_HEADER = struct.Struct("<5Q")
_OFFSET_BITS = 32  # layout of a tag: parcel bit, ticket, offset in the grant
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_PARCEL_BIT = 1 << 63


class InvalidParcel(ValueError):
    """The header of a parcel does not match its message."""


@dataclass(frozen=True, slots=True)
class MessageRun:
    offset: int  # bytes from the start of the grant
    span: BlockRun  # source memory on P


@dataclass(frozen=True, slots=True)
class Parcel:
    """The same layers of consecutive blocks of a grant."""

    first: int  # index of the first block in the grant
    sources: tuple[BlockId, ...]
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Label:
    """Content of a message tag."""

    ticket: int
    offset: int = 0
    is_parcel: bool = False

    def to_tag(self, region: Region) -> int:
        """Encode the label. `region` is D's."""
        num_units = self.offset // _unit_bytes(region)
        return self.is_parcel * _PARCEL_BIT | self.ticket << _OFFSET_BITS | num_units

    @classmethod
    def from_tag(cls, tag: int, region: Region) -> Label:
        is_parcel = bool(tag & _PARCEL_BIT)
        ticket = (tag & ~_PARCEL_BIT) >> _OFFSET_BITS
        return cls(ticket, (tag & _OFFSET_MASK) * _unit_bytes(region), is_parcel)


def split_write(
    write: Write, region: Region, peer_region: Region
) -> list[MessageRun] | list[Parcel]:
    runs = list(_runs(write, region, peer_region))
    num_bytes = len(write.sources) * len(write.layers.byte_range(region.block_bytes))
    if len(runs) > 1 and num_bytes < len(runs) * MAX_PARCEL_RUN_BYTES:
        return list(_parcels(write, region))
    max_bytes = max(1, MAX_RUN_BYTES // region.block_bytes) * region.block_bytes
    return [piece for run in runs for piece in _split(run, max_bytes)]


def encode_header(parcel: Parcel) -> bytes:
    layers = parcel.layers
    fields = (parcel.first, len(parcel.sources), layers.first, layers.end, layers.of)
    return _HEADER.pack(*fields).ljust(HEADER_BYTES)


def parse_parcel_header(
    header: bytes, num_bytes: int, num_granted: int, block_bytes: int
) -> tuple[range, LayerRange]:
    """Decode the header of a parcel of `num_bytes` bytes.

    Return the indices of its blocks in the grant, and its layers. Raise InvalidParcel if invalid.
    """
    first, num_blocks, first_layer, end_layer, of = _HEADER.unpack_from(header)
    if not (0 <= first_layer < end_layer <= of <= block_bytes) or block_bytes % of:
        raise InvalidParcel(f"invalid layers: {first_layer} to {end_layer} of {of}")
    layers = LayerRange(first_layer, end_layer, of)
    part = layers.byte_range(block_bytes)
    is_granted = 0 < num_blocks <= num_granted - first
    if not is_granted or num_blocks * len(part) != num_bytes:
        raise InvalidParcel(f"invalid size: {num_bytes} bytes for {num_blocks} blocks from {first}")
    return range(first, first + num_blocks), layers


def find_target(
    label: Label, num_bytes: int, block_ids: Sequence[BlockId], region: Region
) -> BlockRun | None:
    """Return the target memory of a run; None if it is not inside contiguous granted blocks."""
    block_bytes = region.block_bytes
    first, within = divmod(label.offset, block_bytes)
    num_blocks = max(1, num_bytes // block_bytes)
    fits = 0 < num_bytes <= num_blocks * block_bytes - within
    runs = spans(region, block_ids[first : first + num_blocks])
    if not fits or len(runs) != 1 or runs[0].num_bytes != num_blocks * block_bytes:
        return None
    return BlockRun(runs[0].address + within, num_bytes)


def _runs(write: Write, region: Region, peer_region: Region) -> Iterator[MessageRun]:
    block_bytes = region.block_bytes
    offset = write.first * block_bytes
    if write.layers.is_whole:
        for run in pair_spans(region, write.sources, peer_region, write.targets):
            yield MessageRun(offset, BlockRun(run.source, run.num_bytes))
            offset += run.num_bytes
        return
    part = write.layers.byte_range(block_bytes)
    for source in write.sources:
        (block,) = spans(region, (source,))
        yield MessageRun(offset + part.start, BlockRun(block.address + part.start, len(part)))
        offset += block_bytes


def _split(run: MessageRun, max_bytes: int) -> Iterator[MessageRun]:
    for start in range(0, run.span.num_bytes, max_bytes):
        num_bytes = min(max_bytes, run.span.num_bytes - start)
        yield MessageRun(run.offset + start, BlockRun(run.span.address + start, num_bytes))


def _parcels(write: Write, region: Region) -> Iterator[Parcel]:
    """Split a write evenly into parcels that each fit into a slot."""
    part_bytes = len(write.layers.byte_range(region.block_bytes))
    max_blocks = max(1, (SLOT_BYTES - HEADER_BYTES) // part_bytes)
    num_blocks = len(write.sources)
    num_parcels = -(-num_blocks // max_blocks)
    cuts = [num_blocks * index // num_parcels for index in range(num_parcels + 1)]
    for start, end in pairwise(cuts):
        yield Parcel(write.first + start, write.sources[start:end], write.layers)


def _unit_bytes(region: Region) -> int:
    """Return the unit of offsets in a tag: 1 byte for regions up to 4 GiB.

    In larger regions, layer sizes must be multiples of the unit.
    """
    return 1 << max(0, (region.num_bytes - 1).bit_length() - _OFFSET_BITS)
