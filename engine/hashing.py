"""Names for KV blocks: the hash of a block's tokens and of everything before them.

Two blocks with one name hold the same KV, on any node with the same model and settings,
so a router can look for a prompt's blocks without asking. The hash is cryptographic: a
prompt made to collide would read another user's KV.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
MAX_TOKEN_ID = 2**32 - 1  # a token id is packed into four bytes


@dataclass(frozen=True, slots=True)
class PrefixNaming:
    """How a node names its blocks: who knows it can tell what the node has without asking."""

    block_size: int
    # Everything that makes the same tokens give other KV: weights, dtype, layout.
    model_salt: str = ""
    hash_seed: int = 0
    # Longer prompts share blocks with prompts of their own length alone. None: all share.
    max_shareable_prompt_len: int | None = None

    def root(self, cache_salt: str, num_prompt_tokens: int) -> BlockHash:
        limit = self.max_shareable_prompt_len
        if limit is not None and num_prompt_tokens > limit:
            cache_salt = f"{num_prompt_tokens}:{cache_salt}"
        return root_hash(self.hash_seed, self.model_salt, cache_salt)

    def names(
        self, token_ids: Sequence[int], num_prompt_tokens: int, cache_salt: str = ""
    ) -> list[BlockHash]:
        """Those of the full blocks of a prompt and what was written after it."""
        root = self.root(cache_salt, num_prompt_tokens)
        return block_hashes(token_ids, self.block_size, root)


def root_hash(hash_seed: int, model_salt: str, cache_salt: str) -> BlockHash:
    """What the first block's hash is chained to. Different salts never share a block."""
    named = f"baton kv 1:{hash_seed}:{len(model_salt)}:{model_salt}:{cache_salt}"
    return BlockHash(blake2b(named.encode(), digest_size=HASH_BYTES).digest())


def extend_hashes(
    hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int], block_size: int
) -> None:
    """Append the hashes of those full blocks of `token_ids` that have none yet."""
    pack = _packer(block_size).pack
    parent = hashes[-1] if hashes else root
    full = len(token_ids) // block_size * block_size
    for start in range(len(hashes) * block_size, full, block_size):
        packed = pack(*token_ids[start : start + block_size])
        parent = BlockHash(blake2b(parent + packed, digest_size=HASH_BYTES).digest())
        hashes.append(parent)


def block_hashes(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """The hashes of all full blocks of a sequence."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size)
    return hashes


@lru_cache(maxsize=16)
def _packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")
