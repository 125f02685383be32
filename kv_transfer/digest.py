"""The digest of a hand-off's bytes: xxh3-64 over its blocks in order, streaming."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import xxhash

from kv_transfer.messages import Region
from kv_transfer.spans import Span, spans
from kv_transfer.types import BlockId


class BlockDigest:
    """Grows as blocks are sent; both sides get the same value from the same bytes."""

    def __init__(self, region: Region) -> None:
        if region.device != "cpu":
            raise ValueError(f"blocks on {region.device} cannot be read for a digest")
        self._region = region
        self._state = xxhash.xxh3_64()

    def add(self, block_ids: Sequence[BlockId]) -> None:
        for span in spans(self._region, block_ids):
            self._state.update(_view(span))

    def value(self) -> int:
        return self._state.intdigest()


def _view(span: Span) -> memoryview:
    return memoryview((ctypes.c_char * span.num_bytes).from_address(span.address))
