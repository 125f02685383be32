"""Of which messages a write over UCXX is made, and what they say of themselves. Pure.

A message is a run of bytes that is one on both sides, and its tag says where in the grant it
belongs; or a parcel of many small runs, and its header says it. What a message costs beside its
bytes, Python's time on both sides above all, is worth the copying of some hundred KiB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kv_transfer.messages import Region
from kv_transfer.spans import Span, pair_spans, part_of, spans
from kv_transfer.staging import SLOT_BYTES
from kv_transfer.transport import LayerRange, Write
from kv_transfer.types import BlockId

PARCELS_BELOW_BYTES = 256 << 10  # of a run, on average
MAX_RUN_BYTES = 1 << 20  # unless a block is larger
HEADER_BYTES = 64
_HEADER = struct.Struct("<5Q")
_OFFSET_BITS = 32  # a tag is what kind it is, the ticket, then where in the grant's bytes
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_PARCEL_BIT = 1 << 63


class NotAParcel(ValueError):
    """A header that names nothing which its message could hold."""


@dataclass(frozen=True, slots=True)
class Run:
    offset: int  # in the bytes of the grant
    span: Span  # on P


@dataclass(frozen=True, slots=True)
class Parcel:
    """The same layers of neighbouring blocks of a grant."""

    first: int  # place of the first block in the grant
    sources: tuple[BlockId, ...]
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Label:
    """What a tag says."""

    ticket: int
    offset: int = 0
    is_parcel: bool = False

    def to_tag(self, region: Region) -> int:
        """`region` is D's."""
        place = self.offset // _unit_bytes(region)
        return self.is_parcel * _PARCEL_BIT | self.ticket << _OFFSET_BITS | place

    @classmethod
    def from_tag(cls, tag: int, region: Region) -> Label:
        is_parcel = bool(tag & _PARCEL_BIT)
        ticket = (tag & ~_PARCEL_BIT) >> _OFFSET_BITS
        return cls(ticket, (tag & _OFFSET_MASK) * _unit_bytes(region), is_parcel)


def messages_of(write: Write, region: Region, peer_region: Region) -> list[Run] | list[Parcel]:
    runs = list(_runs(write, region, peer_region))
    num_bytes = len(write.sources) * len(part_of(region.block_bytes, write.layers))
    if len(runs) > 1 and num_bytes < len(runs) * PARCELS_BELOW_BYTES:
        return list(_parcels(write, region))
    most = max(1, MAX_RUN_BYTES // region.block_bytes) * region.block_bytes
    return [piece for run in runs for piece in _cut(run, most)]


def header_of(parcel: Parcel) -> bytes:
    layers = parcel.layers
    fields = (parcel.first, len(parcel.sources), layers.first, layers.end, layers.of)
    return _HEADER.pack(*fields).ljust(HEADER_BYTES)


def opened(
    header: bytes, num_bytes: int, num_granted: int, block_bytes: int
) -> tuple[range, LayerRange]:
    """The places in the grant that a parcel of so many bytes fills, and which layers of each."""
    first, num_blocks, first_layer, end_layer, of = _HEADER.unpack_from(header)
    if not (0 <= first_layer < end_layer <= of <= block_bytes) or block_bytes % of:
        raise NotAParcel(f"layers {first_layer} to {end_layer} of {of}")
    layers = LayerRange(first_layer, end_layer, of)
    part = part_of(block_bytes, layers)
    is_granted = 0 < num_blocks <= num_granted - first
    if not is_granted or num_blocks * len(part) != num_bytes:
        raise NotAParcel(f"{num_bytes} bytes for {num_blocks} blocks from {first} on")
    return range(first, first + num_blocks), layers


def target_of(
    label: Label, num_bytes: int, block_ids: Sequence[BlockId], region: Region
) -> Span | None:
    """Where a run belongs; None if it is no run of granted blocks and no part of one."""
    block_bytes = region.block_bytes
    first, within = divmod(label.offset, block_bytes)
    num_blocks = max(1, num_bytes // block_bytes)
    is_fit = 0 < num_bytes <= num_blocks * block_bytes - within
    runs = spans(region, block_ids[first : first + num_blocks])
    if not is_fit or len(runs) != 1 or runs[0].num_bytes != num_blocks * block_bytes:
        return None
    return Span(runs[0].address + within, num_bytes)


def _runs(write: Write, region: Region, peer_region: Region) -> Iterator[Run]:
    block_bytes = region.block_bytes
    offset = write.first * block_bytes
    if write.layers is None:
        for run in pair_spans(region, write.sources, peer_region, write.targets):
            yield Run(offset, Span(run.source, run.num_bytes))
            offset += run.num_bytes
        return
    part = part_of(block_bytes, write.layers)
    for source in write.sources:
        (block,) = spans(region, (source,))
        yield Run(offset + part.start, Span(block.address + part.start, len(part)))
        offset += block_bytes


def _cut(run: Run, most: int) -> Iterator[Run]:
    for start in range(0, run.span.num_bytes, most):
        num_bytes = min(most, run.span.num_bytes - start)
        yield Run(run.offset + start, Span(run.span.address + start, num_bytes))


def _parcels(write: Write, region: Region) -> Iterator[Parcel]:
    """As many blocks in each as go into a slot, spread evenly."""
    layers = write.layers or LayerRange(0, 1, 1)
    part_bytes = len(part_of(region.block_bytes, layers))
    most = max(1, (SLOT_BYTES - HEADER_BYTES) // part_bytes)
    num_blocks = len(write.sources)
    num_parcels = -(-num_blocks // most)
    cuts = [num_blocks * one // num_parcels for one in range(num_parcels + 1)]
    for start, end in pairwise(cuts):
        yield Parcel(write.first + start, write.sources[start:end], layers)


def _unit_bytes(region: Region) -> int:
    """Of the offsets in a grant of this region; layers of odd sizes need less than 4 GiB."""
    return 1 << max(0, (region.num_bytes - 1).bit_length() - _OFFSET_BITS)
