"""Names of the blocks of all kinds of memory, by which every cache finds them.

A block of tokens of the first group is named by its hash. In other groups, the number of the group
follows the hash. The parts of a snapshot of the recurrent state are named by the hash of the block
of tokens at whose end it was taken, the number of the group and that of the part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from baton.core.ids import BlockName
from baton.engine.errors import BlocksUnaccounted
from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.engine.kv_cache.groups import CacheLayout

_PART_BYTES = 2  # of the number of a part


def name_in_group(block_hash: BlockHash, group: int) -> BlockHash:
    """Return the name of a block of this group. The first group's is the hash itself."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def group_of(name: BlockName) -> int:
    """Return the number of the group of a block, of whatever kind."""
    return name[HASH_BYTES] if len(name) > HASH_BYTES else 0


def snapshot_names(block_hash: BlockHash, group: int, num_parts: int) -> list[BlockHash]:
    """Return the names of the blocks of the snapshot at the end of a block of tokens."""
    start = block_hash + bytes((group,))
    return [BlockHash(start + part.to_bytes(_PART_BYTES, "big")) for part in range(num_parts)]


def snapshot_end(name: BlockName) -> BlockHash | None:
    """Return the hash of the block at the end of a snapshot, from the name of a part of it.

    Returns None for other names.
    """
    is_part = len(name) == HASH_BYTES + 1 + _PART_BYTES
    return BlockHash(name[:HASH_BYTES]) if is_part else None


class PrefixEnds:
    """Blocks of tokens after which a prefix hit can end, from the names of all blocks of a cache.

    They are the blocks of the first KV group. With recurrent layers, they are those at whose end
    all parts of a snapshot are there.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self._group = len(layout.groups)  # of states
        self._num_parts = layout.num_state_blocks  # of a snapshot; 0: no recurrent layers
        self._num_held: Counter[BlockHash] = Counter()  # parts by block

    def __contains__(self, end: BlockHash) -> bool:
        """Return whether all parts of a snapshot are there."""
        return self._num_held[end] == self._num_parts

    def add(self, names: Iterable[BlockName]) -> list[BlockHash]:
        """Note that a cache has gained these blocks. Returns the ends among them."""
        if not self._num_parts:
            return _first_group(names)
        gained = []
        for end in filter(None, map(snapshot_end, names)):
            self._num_held[end] += 1
            if self._num_held[end] == self._num_parts:
                gained.append(end)
        return gained

    def remove(self, names: Iterable[BlockName]) -> list[BlockHash]:
        """Note that a cache has lost these blocks. Returns the ends that are none any more."""
        if not self._num_parts:
            return _first_group(names)
        lost = []
        for end in filter(None, map(snapshot_end, names)):
            if self._num_held[end] == self._num_parts:
                lost.append(end)
            self._num_held[end] -= 1
            if not self._num_held[end]:
                del self._num_held[end]
        return lost

    def parts(self, end: BlockHash) -> list[BlockHash]:
        """Return the names of the parts of a snapshot."""
        return snapshot_names(end, self._group, self._num_parts)

    def clear(self) -> None:
        self._num_held.clear()

    def check(self, names: Iterable[BlockName]) -> None:
        """Raise BlocksUnaccounted unless a cache with these blocks has whole snapshots alone."""
        found = Counter(filter(None, map(snapshot_end, names)))
        expected = dict.fromkeys(self._num_held, self._num_parts)
        if found != expected:
            num_found, num_expected = found.total(), sum(expected.values())
            raise BlocksUnaccounted(f"snapshots: {num_found} blocks of {num_expected} are cached")


def _first_group(names: Iterable[BlockName]) -> list[BlockHash]:
    return [BlockHash(name) for name in names if len(name) == HASH_BYTES]
