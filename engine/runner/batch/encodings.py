"""Encodings of pictures in memory, and the tokens of a pass that take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import BlockId, RequestId
from baton.core.media import Picture
from baton.engine.errors import EncodingMissing
from baton.engine.plan import EncodingSource, MediaOrders, StoredEncoding
from baton.engine.runner.model.pass_layout import Ints, TokenRun

LayerDone = Callable[[int], None]


class PictureEncoder(Protocol):
    """A vision tower. Holds no request state."""

    def encode(
        self, pictures: Sequence[Picture], layer_done: LayerDone | None = None
    ) -> list[Tensor]:
        """Return a row for each token that stands for a picture: [tokens, encoding_size].

        An encoding does not depend on the other pictures. Calls `layer_done` with the index of
        each layer of each picture. Raises ValueError for pixels of a wrong size.
        """
        ...


class MediaRows(NamedTuple):
    """Rows of encodings, and the tokens of the flat batch that take them."""

    tokens: Ints  # indices into the flat batch
    rows: Tensor


class Encodings:
    """Carries out what plans order, so that it holds what the scheduler counts."""

    def __init__(
        self, encoder: PictureEncoder | None, blocks: EncodingBlocks | None = None
    ) -> None:
        """Without an encoder, all encodings are in blocks."""
        self._encoder = encoder
        self._blocks = blocks
        self._rows: dict[bytes, Tensor] = {}  # by digest

    def apply(
        self, orders: MediaOrders, layer_done: LayerDone | None = None
    ) -> dict[RequestId, float]:
        """Forget encodings, then encode or read those that are not here.

        Returns how long that took, for each request with a picture to encode.
        """
        began_s = time.monotonic()
        for digest in orders.freed:
            self._rows.pop(digest, None)
        for source in _distinct(orders.encoded):
            if source.digest not in self._rows:
                self._rows[source.digest] = self._get(source, layer_done)
        encoding = (key for key, its in orders.encoded.items() if any(map(_is_picture, its)))
        return dict.fromkeys(encoding, time.monotonic() - began_s)

    def of(self, digest: bytes) -> Tensor:
        """Return all rows of an encoding."""
        return self._rows[digest]

    def rows_for(self, runs: Sequence[TokenRun]) -> MediaRows | None:
        """Return what the tokens of a pass take; None if all are text."""
        tokens: list[int] = []
        rows: list[Tensor] = []
        first = 0
        for run in runs:
            start = run.end - run.num_tokens
            for segment in run.row.media:
                if segment.overlaps(start, run.end):
                    begin = max(segment.start, start)
                    end = min(segment.start + segment.num_tokens, run.end)
                    tokens += range(first + begin - start, first + end - start)
                    skipped = segment.first - segment.start
                    rows.append(self._part(segment.digest, begin + skipped, end + skipped))
            first += run.num_tokens
        return MediaRows(np.array(tokens, dtype=np.int64), torch.cat(rows)) if rows else None

    def _get(self, source: EncodingSource, layer_done: LayerDone | None) -> Tensor:
        if isinstance(source, Picture) and self._encoder is not None:
            [rows] = self._encoder.encode([source], layer_done)
            return rows
        if isinstance(source, StoredEncoding) and self._blocks is not None:
            return self._blocks.read(source.block_ids, source.num_rows)
        raise EncodingMissing("a picture is due, but this runner can neither encode nor read it")

    def _part(self, digest: bytes, first: int, end: int) -> Tensor:
        rows = self._rows.get(digest)
        if rows is None or end > len(rows):
            found = "none" if rows is None else f"{len(rows)} rows"
            raise EncodingMissing(f"rows up to {end} of a picture's encoding are due: {found}")
        return rows[first:end]


def _is_picture(source: EncodingSource) -> bool:
    return isinstance(source, Picture)


def _distinct(encoded: Mapping[RequestId, Sequence[EncodingSource]]) -> Iterator[EncodingSource]:
    by_digest = {each.digest: each for sources in encoded.values() for each in sources}
    yield from by_digest.values()


class EncodingBlocks:
    """Encodings in blocks of the KV cache, as bytes that fill one block after the other."""

    def __init__(self, kv: Tensor, row_bytes: int, dtype: torch.dtype) -> None:
        """`row_bytes` and `dtype`: of the rows of encodings, and of their numbers."""
        self._blocks = kv.flatten(1).view(torch.uint8)
        self._row_bytes = row_bytes
        self._dtype = dtype

    def read(self, block_ids: Sequence[BlockId], num_rows: int) -> Tensor:
        """Return a copy of an encoding. The blocks may be written again on return."""
        stored = self._blocks[self._index(block_ids)].flatten()
        rows = stored[: num_rows * self._row_bytes].view(self._dtype).view(num_rows, -1)
        if rows.is_cuda:
            torch.cuda.current_stream().synchronize()
        return rows

    def write(self, rows: Tensor, places: range, block_ids: Sequence[BlockId]) -> None:
        """Write the part of an encoding that is due at these places into these blocks."""
        num_bytes = self._blocks.shape[1]
        written = rows.to(self._dtype).contiguous().view(torch.uint8).flatten()
        written = written[places.start * num_bytes : places.stop * num_bytes]
        padding = len(places) * num_bytes - len(written)
        padded = torch.nn.functional.pad(written, (0, padding))  # the same bytes on all nodes
        self._blocks[self._index(block_ids)] = padded.view(len(places), num_bytes)

    def _index(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._blocks.device)
