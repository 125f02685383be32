"""Digest of a hand-off's bytes: xxh3-64 over the xxh3-64 hashes of its blocks, in order.

A hash per block, rather than one over all bytes, is what a device can compute in parallel.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from baton.core.ids import BlockId, HandoffId
from baton.kv_transfer.protocol.conversion import StagingArea
from baton.kv_transfer.protocol.messages import Region

HASH_BYTES = 8

# Returns the hashes of some blocks, 8 bytes each (big-endian), once they are computed.
AwaitHashes = Callable[[], bytes]
# Begins to hash some blocks. On a device, they are read after all launched work has finished: the
# sender digests the final content, so that a write sent before its fence had passed does not match
# the announced digest.
HashBlocks = Callable[[Sequence[BlockId]], AwaitHashes]


def hash_region(region: Region) -> HashBlocks:
    """Return the function that hashes blocks of a region in memory that the CPU can read."""
    if region.device != "cpu":
        raise ValueError(f"blocks on {region.device} cannot be read for a digest")
    memory = memoryview((ctypes.c_char * region.num_bytes).from_address(region.base)).cast("B")
    size, num_blocks = region.block_bytes, region.num_blocks
    digest = xxhash.xxh3_64_digest

    def hash_blocks(block_ids: Sequence[BlockId]) -> AwaitHashes:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
            raise ValueError(f"a block is outside a region of {num_blocks} blocks")
        hashes = b"".join([digest(memory[i * size : (i + 1) * size]) for i in block_ids])
        return lambda: hashes

    return hash_blocks


class BlockDigest:
    """Digest of blocks that are added in order. It waits for their hashes when it is read."""

    def __init__(self, hash_blocks: HashBlocks) -> None:
        self._hash_blocks = hash_blocks
        self._state = xxhash.xxh3_64()
        self._num_blocks = 0
        self._pending: deque[tuple[int, AwaitHashes]] = deque()  # number of blocks after it
        self._value_by_count: dict[int, int] = {}  # by the number of blocks after each `add`

    def add(self, block_ids: Sequence[BlockId]) -> None:
        self._num_blocks += len(block_ids)
        self._pending.append((self._num_blocks, self._hash_blocks(block_ids)))

    def value(self) -> int:
        self._read_hashes(self._num_blocks)
        return self._state.intdigest()

    def value_after(self, num_blocks: int) -> int | None:
        """Return the digest of the first blocks; None if no `add` ended there."""
        # The peer may have added more at a time: only where both ended a part can they compare.
        self._read_hashes(num_blocks)
        return self._value_by_count.get(num_blocks)

    def _read_hashes(self, num_blocks: int) -> None:
        while self._pending and self._pending[0][0] <= num_blocks:
            num_hashed, await_hashes = self._pending.popleft()
            self._state.update(await_hashes())
            self._value_by_count[num_hashed] = self._state.intdigest()


class Digests:
    """Digests of the open hand-offs. A node either sends or receives a hand-off."""

    def __init__(
        self,
        region: Region,
        *,
        is_on: bool,
        hash_blocks: HashBlocks | None = None,
        staging: StagingArea | None = None,
    ) -> None:
        """Without `hash_blocks`, the region must be in memory that the CPU can read."""
        self._staging = staging
        self._is_on = is_on
        self._hash_blocks = hash_blocks
        if is_on and hash_blocks is None:
            self._hash_blocks = hash_region(region)
        self._open: dict[HandoffId, BlockDigest] = {}
        self.num_mismatches = 0

    def add(self, handoff_id: HandoffId, block_ids: Sequence[BlockId]) -> None:
        """Add the next blocks that were sent, or that have landed."""
        if self._hash_blocks is None or not self._is_on:
            return
        if handoff_id not in self._open:
            staged = None if self._staging is None else self._staging.find(handoff_id)
            hash_blocks = self._hash_blocks
            if staged is not None:
                hash_blocks = hash_region(staged.conversion.region)
            self._open[handoff_id] = BlockDigest(hash_blocks)
        self._open[handoff_id].add(block_ids)

    def value_after(self, handoff_id: HandoffId, num_blocks: int) -> int | None:
        """Return the digest of the first blocks; None if no `add` ended there."""
        digest = self._open.get(handoff_id)
        return digest.value_after(num_blocks) if digest is not None else None

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
