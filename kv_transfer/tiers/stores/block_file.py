"""File of one block: its bytes behind a header, and its modification time."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from baton.core.ids import BlockName
from baton.kv_transfer.tiers.eviction import DEFAULT_PRIORITY
from baton.kv_transfer.tiers.kv_access import BlockMemory
from baton.kv_transfer.tiers.stores.stored_blocks import HEADER_BYTES, digest_in_header, pack_header

MAX_PRIORITY = 100
_NS = 1_000_000_000
# Of the fraction of a second, the first three digits mark a priority, the next three are it, and
# the others are 0. File systems keep microseconds at least; clocks seldom hit such a fraction.
_MARK, _PRIORITY_NS = 735, 1000


@dataclass(frozen=True, slots=True)
class BlockTime:
    """State of a block that the modification time of its file keeps over restarts.

    Times of older versions, and those that others set, mean the default priority. Older versions
    read a time with a priority as one within the same second.
    """

    used_s: float  # last use; in the future: end of the retention; 0: the block is released
    priority: int = DEFAULT_PRIORITY

    @classmethod
    def from_ns(cls, time_ns: int) -> BlockTime:
        mark, rest = divmod(time_ns % _NS, 1000 * _PRIORITY_NS)
        priority, below = divmod(rest, _PRIORITY_NS)
        if mark == _MARK and priority <= MAX_PRIORITY and not below:
            return cls(float(time_ns // _NS), priority)
        return cls(time_ns / _NS)

    def to_ns(self) -> int:
        if self.priority == DEFAULT_PRIORITY or not self.used_s:
            return int(self.used_s * _NS)
        return int(self.used_s) * _NS + (_MARK * 1000 + self.priority) * _PRIORITY_NS


class ReadBlock(NamedTuple):
    digest: bytes | None  # None: the file is not whole, or its bytes are not those of the block
    time: BlockTime


def read_block(path: Path, name: BlockName, memory: BlockMemory, block: int) -> ReadBlock:
    """Read the file of a block into memory, and verify its digest. Raises OSError."""
    num_file_bytes = HEADER_BYTES + memory.block_bytes
    view = memory.view(block)
    header = bytearray(HEADER_BYTES)
    with path.open("rb", buffering=0) as file:
        num_bytes = os.preadv(file.fileno(), [header, view], 0)
        while HEADER_BYTES <= num_bytes < num_file_bytes:  # a read may be short
            more = os.preadv(file.fileno(), [view[num_bytes - HEADER_BYTES :]], num_bytes)
            if not more:
                break
            num_bytes += more
        facts = os.fstat(file.fileno())
    digest = digest_in_header(header, name, memory.block_bytes)
    is_whole = num_bytes == facts.st_size == num_file_bytes
    is_valid = is_whole and digest is not None and memory.digest(block) == digest
    return ReadBlock(digest if is_valid else None, BlockTime.from_ns(facts.st_mtime_ns))


def can_read(path: Path) -> bool:
    try:
        with path.open("rb", buffering=0) as file:
            file.read(1)
    except OSError:
        return False
    return True


def write_block(
    path: Path, part: Path, name: BlockName, memory: BlockMemory, block: int, digest: bytes
) -> None:
    """Write the file of a block, as `part` until it is whole. Raises OSError, and leaves nothing.

    `part` is in the same folder.
    """
    try:
        with part.open("wb", buffering=0) as file:
            file.write(pack_header(name, digest, memory.block_bytes))
            rest = memory.view(block)
            while rest:  # a write may be short, and then the next one says why
                rest = rest[file.write(rest) :]
        part.rename(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
