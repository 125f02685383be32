"""File of packed matrices: their bytes on pages of their own, then a table, then its digest.

    matrix │ padding │ matrix │ … │ table (JSON) │ size of the table │ digest of the table

The table has a digest of every piece of every matrix. They are checked before the file is mapped:
one that was cut short or changed is found. Nodes of a machine share the mapped pages.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from baton.engine.runner.device.host_memory import map_file
from baton.engine.runner.weights.packed_weight import PackedWeight

PAGE = 4096
PIECE_BYTES = 4 << 20  # read or written at once
_TRAILER = struct.Struct("<Q32s")  # size and digest of the table
Report = Callable[[int, int], None]  # finished bytes, and all


class DamagedFile(Exception):
    """The file is not as it was written; the message has the reason."""


@dataclass(frozen=True, slots=True)
class _Region:
    """Part of the file."""

    first: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.first + self.num_bytes

    @property
    def next_page(self) -> int:
        return -(-self.end // PAGE) * PAGE

    def pieces(self) -> Iterator[_Region]:
        for first in range(self.first, self.end, PIECE_BYTES):
            yield _Region(first, min(PIECE_BYTES, self.end - first))


def num_packed_bytes(weights: Mapping[str, PackedWeight]) -> int:
    """Return the size of a file of these matrices, without its table."""
    return sum(_Region(0, len(data)).next_page for data in _tensors(weights))


def write_packed(
    file: BinaryIO, digest: str, weights: Mapping[str, PackedWeight], num_threads: int
) -> None:
    """Write matrices in order. `digest` is that of the weights that were packed."""
    regions, pieces, at = [], [], 0
    for data in _tensors(weights):
        region = _Region(at, len(data))
        at = region.next_page
        regions.append(region)
        pieces += [(part, data[part.first - region.first :]) for part in region.pieces()]

    def write(piece: tuple[_Region, Tensor]) -> str:
        region, data = piece
        view = data[: region.num_bytes].cpu().numpy().data
        written = 0
        while written < len(view):  # a part of it before the disk is full
            written += os.pwrite(file.fileno(), view[written:], region.first + written)
        return xxh3_128_hexdigest(view)

    os.ftruncate(file.fileno(), 0)
    with ThreadPoolExecutor(num_threads) as threads:
        digests = list(threads.map(write, pieces))
    table = json.dumps(
        {
            "digest": digest,
            "pieces": digests,
            "matrices": [
                [name, dict(packed.fields), packed.column_order is not None]
                for name, packed in weights.items()
            ],
            "sizes": [region.num_bytes for region in regions],
        }
    ).encode()
    file.seek(at)
    file.write(table + _TRAILER.pack(len(table), xxh3_128_hexdigest(table).encode()))
    file.flush()


def read_packed(
    file: BinaryIO, digest: Callable[[], str], num_threads: int, report: Report
) -> dict[str, PackedWeight]:
    """Map the matrices, once they are checked. Raises DamagedFile, and OSError.

    Only called for a whole table, `digest` returns the digest of the weights as they are now.
    """
    table, end = _read_table(file)
    if table["digest"] != digest():
        raise DamagedFile("it is of other weights")
    regions, at = [], 0
    for size in table["sizes"]:
        regions.append(_Region(at, size))
        at = regions[-1].next_page
    if at != end:
        raise DamagedFile(f"its matrices end at {at}, its table starts at {end}")
    _check_pieces(file, regions, table["pieces"], num_threads, report)
    whole = torch.frombuffer(map_file(file), dtype=torch.uint8)
    tensors = iter([whole[region.first : region.end] for region in regions])
    return {
        name: PackedWeight(
            fields, next(tensors), next(tensors).view(torch.int64) if has_order else None
        )
        for name, fields, has_order in table["matrices"]
    }


def _tensors(weights: Mapping[str, PackedWeight]) -> Iterator[Tensor]:
    """Yield the bytes of all tensors."""
    for packed in weights.values():
        yield packed.data
        if packed.column_order is not None:
            yield packed.column_order.long().contiguous().view(torch.uint8)


def _read_table(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the table, and where it starts."""
    num_bytes = os.fstat(file.fileno()).st_size
    trailer = os.pread(file.fileno(), _TRAILER.size, max(num_bytes - _TRAILER.size, 0))
    if len(trailer) < _TRAILER.size:
        raise DamagedFile(f"it has {num_bytes} bytes")
    size, digest = _TRAILER.unpack(trailer)
    first = num_bytes - _TRAILER.size - size
    table = os.pread(file.fileno(), size, first) if first >= 0 else b""
    if xxh3_128_hexdigest(table).encode() != digest:
        raise DamagedFile("its table is damaged")
    found: dict[str, Any] = json.loads(table)
    return found, first


def _check_pieces(
    file: BinaryIO,
    regions: Sequence[_Region],
    digests: Sequence[str],
    num_threads: int,
    report: Report,
) -> None:
    local = threading.local()

    def check(piece: _Region, digest: str) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = memoryview(bytearray(PIECE_BYTES))
        view = local.buffer[: piece.num_bytes]
        if os.preadv(file.fileno(), [view], piece.first) != len(view):
            raise DamagedFile(f"it ends before byte {piece.end}")
        if xxh3_128_hexdigest(view) != digest:
            raise DamagedFile(f"bytes {piece.first} to {piece.end} are damaged")
        return len(view)

    pieces = [piece for region in regions for piece in region.pieces()]
    finished = 0
    with ThreadPoolExecutor(num_threads) as threads:
        for num_bytes in threads.map(check, pieces, digests):
            finished += num_bytes
            report(finished, sum(region.num_bytes for region in regions))
