"""Names of the blocks of all kinds of memory, by which every cache finds them.

A block of tokens of the first KV group is named by its hash. In other groups, the number of the
group follows the hash. The parts of a snapshot of the recurrent state are named by the hash of the
block of tokens at whose end it was taken, a marker and the number of the part.
"""

from __future__ import annotations

from collections import Counter

from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash
from baton.engine.kv_cache.config import CacheConfig
from baton.kv_transfer.external_kv import HeldChanges

# Longer than the number of a group, so that the length of a name says what it names.
_SNAPSHOT = b"state"


def name_in_group(block_hash: BlockHash, group: int) -> BlockHash:
    """Return the name of a block of this group. The first group's is the hash itself."""
    return BlockHash(block_hash + bytes((group,))) if group else block_hash


def is_of_first_group(name: BlockHash) -> bool:
    return len(name) == HASH_BYTES


def group_of(name: BlockHash) -> int | None:
    """Return the group of a block of tokens, or None for a part of a snapshot."""
    if len(name) > HASH_BYTES + 1:
        return None
    return name[HASH_BYTES] if len(name) > HASH_BYTES else 0


def snapshot_name(block_hash: BlockHash, part: int) -> BlockHash:
    return BlockHash(block_hash + _SNAPSHOT + part.to_bytes(2, "big"))


def snapshot_names(block_hash: BlockHash, num_parts: int) -> list[BlockHash]:
    """Return the names of the blocks of the snapshot at the end of a block of tokens."""
    return [snapshot_name(block_hash, part) for part in range(num_parts)]


def snapshot_end(name: BlockHash) -> BlockHash | None:
    """Return the hash of the block at the end of a snapshot, from the name of a part of it.

    Returns None for other names.
    """
    is_part = name.startswith(_SNAPSHOT, HASH_BYTES)
    return BlockHash(name[:HASH_BYTES]) if is_part else None


class HostNames:
    """Translates changes of host memory into changes of names that a prefix hit may end with.

    These are the names of the first KV group. With recurrent layers, they are those of the blocks
    at whose end all parts of a snapshot are there.
    """

    def __init__(self, config: CacheConfig) -> None:
        self._num_parts = config.layout.num_state_blocks
        self._num_held: Counter[BlockHash] = Counter()  # parts by block

    def translate(self, changes: HeldChanges) -> HeldChanges:
        removed, added = (
            [BlockHash(name) for name in names] for names in (changes.removed, changes.added)
        )
        if self._num_parts:
            # In this order: a snapshot that loses a part and gains another one is never whole.
            ended = [end for name in removed if (end := self._remove(name)) is not None]
            whole = [end for name in added if (end := self._add(name)) is not None]
            return HeldChanges(added=tuple(whole), removed=tuple(ended))
        return HeldChanges(
            added=tuple(name for name in added if is_of_first_group(name)),
            removed=tuple(name for name in removed if is_of_first_group(name)),
        )

    def _add(self, name: BlockHash) -> BlockHash | None:
        """Count a part. Returns the block at the end of its snapshot if that is whole now."""
        end = snapshot_end(name)
        if end is None:
            return None
        self._num_held[end] += 1
        return end if self._num_held[end] == self._num_parts else None

    def _remove(self, name: BlockHash) -> BlockHash | None:
        """Count a part. Returns the block at the end of its snapshot if that was whole."""
        end = snapshot_end(name)
        if end is None:
            return None
        was_whole = self._num_held[end] == self._num_parts
        self._num_held[end] -= 1
        if not self._num_held[end]:
            del self._num_held[end]
        return end if was_whole else None
