"""Block hashes of the prefix cache: each covers the tokens of a block and all tokens before it.

Blocks with the same hash hold the same KV, on any node with the same model and settings, so a
router can compute which blocks of a prompt a node has. The hash is cryptographic, since a prompt
crafted to collide would read another user's KV.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NewType

from baton.core.ids import NO_PREFIX_KEYS, PrefixKeys
from baton.core.media import MediaSegment

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
NAMING = "baton kv 2"  # the number changes with what names stand for
MAX_TOKEN_ID = 2**32 - 1  # a token id is packed into four bytes


@dataclass(frozen=True, slots=True)
class PrefixNaming:
    """Parameters of a node's block hashes. With them, a router computes the hashes of a prompt."""

    block_size: int
    # Identifies everything the KV of given tokens depends on: weights, dtype, layout.
    model_salt: str = ""
    hash_seed: int = 0
    # Longer prompts share blocks only with prompts of the same length. None: no limit.
    max_shareable_prompt_len: int | None = None
    # A block is reported only if a prefix can be continued at its end. Others are cached with it.
    needs_snapshot: bool = False

    def root(self, keys: PrefixKeys = NO_PREFIX_KEYS, num_prompt_tokens: int = 0) -> BlockHash:
        """Return the parent hash of first blocks, where the keys of whole requests enter.

        All blocks descend from it, so requests with different keys never share one. The fields are
        hashed as JSON, so that no key can spell the other fields. Media enter in `extend_hashes`.
        """
        limit = self.max_shareable_prompt_len
        is_shared = limit is None or num_prompt_tokens <= limit
        prompt_len = None if is_shared else num_prompt_tokens
        fields = [NAMING, self.hash_seed, self.model_salt, keys.cache_salt, prompt_len]
        if keys.adapter:  # blocks of base models keep their names
            fields.append(keys.adapter)
        return BlockHash(blake2b(json.dumps(fields).encode(), digest_size=HASH_BYTES).digest())

    def names(
        self,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        keys: PrefixKeys = NO_PREFIX_KEYS,
    ) -> list[BlockHash]:
        """Return the hashes of the full blocks of `token_ids`, a prompt and any output after it."""
        root = self.root(keys, num_prompt_tokens)
        return block_hashes(token_ids, self.block_size, root, keys.media)


def extend_hashes(
    hashes: list[BlockHash],
    root: BlockHash,
    token_ids: Sequence[int],
    block_size: int,
    media: Sequence[MediaSegment] = (),
) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
    pack = _packer(block_size).pack
    parent = hashes[-1] if hashes else root
    full = len(token_ids) // block_size * block_size
    for start in range(len(hashes) * block_size, full, block_size):
        packed = pack(*token_ids[start : start + block_size])
        if media:
            packed += _pack_media(media, start, start + block_size)
        parent = BlockHash(blake2b(parent + packed, digest_size=HASH_BYTES).digest())
        hashes.append(parent)


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    root: BlockHash,
    media: Sequence[MediaSegment] = (),
) -> list[BlockHash]:
    """Return the hashes of all full blocks of a sequence."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, root, token_ids, block_size, media)
    return hashes


def _pack_media(media: Sequence[MediaSegment], start: int, end: int) -> bytes:
    """Return the digests and places of the segments in a block: blocks without keep their names."""
    return b"".join(
        struct.pack("<QQQ", segment.start, segment.num_tokens, segment.first) + segment.digest
        for segment in media
        if segment.overlaps(start, end)
    )


@lru_cache(maxsize=16)
def _packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")
