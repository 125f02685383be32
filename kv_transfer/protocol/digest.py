"""Digest of a hand-off's bytes: streaming xxh3-64 over its blocks in order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import xxhash

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.protocol.conversion import StagingArea
from baton.kv_transfer.protocol.memory_runs import spans
from baton.kv_transfer.protocol.messages import Region

# Returns the bytes of some blocks, in order. On a device, it copies them after all launched work
# has finished: the sender digests the final content, so that a write sent before its fence had
# passed does not match the announced digest.
ReadBlocks = Callable[[Sequence[BlockId]], Iterable[memoryview]]


class BlockDigest:
    def __init__(self, region: Region, read_blocks: ReadBlocks | None = None) -> None:
        """Without `read_blocks`, the region must be in memory that the CPU can read."""
        if region.device != "cpu" and read_blocks is None:
            raise ValueError(f"blocks on {region.device} cannot be read for a digest")
        self._read_blocks = read_blocks or partial(_read_locally, region)
        self._state = xxhash.xxh3_64()
        self._num_blocks = 0
        self.value_by_count: dict[int, int] = {}  # by the number of blocks after each `add`

    def add(self, block_ids: Sequence[BlockId]) -> None:
        for part in self._read_blocks(block_ids):
            self._state.update(part)
        self._num_blocks += len(block_ids)
        # The peer may have added more at a time: only where both ended a part can they compare.
        self.value_by_count[self._num_blocks] = self.value()

    def value(self) -> int:
        return self._state.intdigest()


def _read_locally(region: Region, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
    for span in spans(region, block_ids):
        yield memoryview((ctypes.c_char * span.num_bytes).from_address(span.address))


class Digests:
    """Digests of the open hand-offs. A node either sends or receives a hand-off."""

    def __init__(
        self,
        region: Region,
        *,
        is_on: bool,
        read_blocks: ReadBlocks | None = None,
        staging: StagingArea | None = None,
    ) -> None:
        self._region = region
        self._staging = staging
        self._is_on = is_on
        self._read_blocks = read_blocks
        self._open: dict[HandoffId, BlockDigest] = {}
        self.num_mismatches = 0

    def add(self, handoff_id: HandoffId, block_ids: Sequence[BlockId]) -> None:
        """Add the next blocks that were sent, or that have landed."""
        if not self._is_on:
            return
        if handoff_id not in self._open:
            staged = None if self._staging is None else self._staging.find(handoff_id)
            self._open[handoff_id] = (
                BlockDigest(self._region, self._read_blocks)
                if staged is None
                else BlockDigest(staged.conversion.region)
            )
        self._open[handoff_id].add(block_ids)

    def value_after(self, handoff_id: HandoffId, num_blocks: int) -> int | None:
        """Return the digest of the first blocks; None if no `add` ended there."""
        digest = self._open.get(handoff_id)
        return digest.value_by_count.get(num_blocks) if digest is not None else None

    def take(self, handoff_id: HandoffId) -> int | None:
        """Return the digest; None if verification is off or no block was added."""
        digest = self._open.pop(handoff_id, None)
        return digest.value() if digest is not None else None

    def matches(self, handoff_id: HandoffId, rest: Sequence[BlockId], expected: int) -> bool:
        """Return whether the landed blocks, completed by `rest`, match P's digest."""
        if not self._is_on:
            return True
        self.add(handoff_id, rest)
        is_good = self.take(handoff_id) == expected
        self.num_mismatches += not is_good
        return is_good

    def forget(self, handoff_id: HandoffId) -> None:
        self._open.pop(handoff_id, None)
