"""Staging buffers that pack small runs of blocks into one message. Independent of transports.

A slot is lent until it is given back. If a transport may still access a slot when its channel is
closed, the slot is dropped instead, and never lent again.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.core.ids import BlockId
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import LayerRange

SLOT_BYTES = 1 << 20
_SLOTS_AT_ONCE = 8

Slot = npt.NDArray[np.uint8]


class Staging:
    """Pool of slots on huge pages, which make copies between processes faster (ADR 0004)."""

    def __init__(self) -> None:
        self._free: list[Slot] = []
        self.num_bytes = 0  # allocated in total

    def lend(self) -> Slot:
        if not self._free:
            memory = np.frombuffer(_memory(_SLOTS_AT_ONCE * SLOT_BYTES), dtype=np.uint8)
            self._free += np.split(memory, _SLOTS_AT_ONCE)
            self.num_bytes += len(memory)
        return self._free.pop()

    def give_back(self, slot: Slot) -> None:
        self._free.append(slot)


class BlockRows:
    """View of a region's blocks, or of their layers, as rows of bytes."""

    def __init__(self, region: Region) -> None:
        memory = (ctypes.c_uint8 * region.num_bytes).from_address(region.base)
        self._flat: Any = np.ctypeslib.as_array(memory)
        self._block_bytes = region.block_bytes

    def gather(self, block_ids: Sequence[BlockId], layers: LayerRange, into: Slot) -> None:
        """Copy these layers of these blocks into a slot, block by block."""
        rows, places = self._rows(layers.of), layers.places(block_ids)
        out = into.reshape(len(places), rows.shape[1])
        # `out` avoids a temporary array, which would cost as much as the copy.
        np.take(rows, places, axis=0, out=out, mode="clip")

    def scatter(self, block_ids: Sequence[BlockId], layers: LayerRange, out_of: Slot) -> None:
        rows, places = self._rows(layers.of), layers.places(block_ids)
        rows[places] = out_of.reshape(len(places), rows.shape[1])

    def _rows(self, num_layers: int) -> Any:
        return self._flat.reshape(-1, self._block_bytes // num_layers)


def _memory(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
