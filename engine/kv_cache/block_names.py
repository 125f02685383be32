"""Names of the blocks of all kinds of memory, by which every cache finds them.

A block of tokens of the first KV group is named by its hash. In other groups, the number of the
group follows the hash. The parts of a snapshot of the recurrent state are named by the hash of the
block of tokens at whose end it was taken, a marker and the number of the part.
"""

from __future__ import annotations

from baton.engine.kv_cache.block_hashes import HASH_BYTES, BlockHash

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
