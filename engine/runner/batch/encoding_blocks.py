"""Encodings in blocks of the KV cache, as bytes that fill one block after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.core.ids import BlockId


class EncodingBlocks:
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
