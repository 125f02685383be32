"""Copies of KV blocks between the memory of a device and pinned host memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.runner.device.device import CopyStream
from baton.kv_transfer.fence import Fence
from baton.kv_transfer.tiers.kv_access import BlockMemory


class BlockCopies:
    """Implements `DeviceBlocks` by copies on a stream of their own.

    A block is contiguous, so each run of neighbouring blocks is one copy. Copy engines do this next
    to passes. A kernel that gathers blocks would take multiprocessors from passes, and memory to
    gather in; it would save launches, which matters for blocks that are small anyway.
    """

    def __init__(self, kv: Tensor, stream: CopyStream, record: Callable[[], Fence]) -> None:
        """`record` records a fence after all passes launched so far."""
        self._blocks = kv.flatten(1).view(torch.uint8)  # [blocks, bytes]
        self.num_blocks, self.block_bytes = self._blocks.shape
        self._stream = stream
        self.record = record
        self._pinned: dict[mmap.mmap, ExitStack] = {}

    def pin(self, memory: mmap.mmap) -> None:
        """Pin host memory until `unpin` or `close`."""
        pinned = ExitStack()
        pinned.enter_context(self._stream.pinned(torch.frombuffer(memory, dtype=torch.uint8)))
        self._pinned[memory] = pinned

    def unpin(self, memory: mmap.mmap) -> None:
        """End a pin. No copy from or to the memory may be in progress."""
        self._pinned.pop(memory).close()

    def copy_out(self, block_ids: Sequence[int], target: BlockMemory, into: Sequence[int]) -> Fence:
        for run in _runs(block_ids, into):
            self._stream.copy(
                _on_host(target, run.second, run.length), self._on_device(run.first, run.length)
            )
        return self._stream.record()

    def copy_in(
        self, source: BlockMemory, blocks: Sequence[int], block_ids: Sequence[int]
    ) -> Fence:
        for run in _runs(block_ids, blocks):
            self._stream.copy(
                self._on_device(run.first, run.length), _on_host(source, run.second, run.length)
            )
        return self._stream.record()

    def drain(self) -> None:
        self._stream.drain()

    def close(self) -> None:
        self._stream.drain()
        for memory in list(self._pinned):
            self.unpin(memory)

    def _on_device(self, first: int, length: int) -> Tensor:
        end = first + length
        if not 0 <= first < end <= self.num_blocks:
            raise IndexError(f"blocks {first} to {end - 1} of {self.num_blocks}")
        return self._blocks[first:end]


class _Run(NamedTuple):
    """Blocks that are neighbours on both sides."""

    first: int
    second: int  # the first one on the other side
    length: int


def _runs(blocks: Sequence[int], others: Sequence[int]) -> Iterator[_Run]:
    run: _Run | None = None
    for block, other in zip(blocks, others, strict=True):
        if run is not None and (block, other) == (run.first + run.length, run.second + run.length):
            run = run._replace(length=run.length + 1)
            continue
        if run is not None:
            yield run
        run = _Run(block, other, 1)
    if run is not None:
        yield run


def _on_host(memory: BlockMemory, first: int, length: int) -> Tensor:
    """Return blocks of host memory as a tensor: [blocks, bytes]."""
    memory.address_of(first + length - 1)  # raises IndexError
    kind = ctypes.c_uint8 * (length * memory.block_bytes)
    content = kind.from_address(memory.address_of(first))
    return torch.frombuffer(content, dtype=torch.uint8).view(length, memory.block_bytes)
