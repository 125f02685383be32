"""Hashes of KV blocks, computed where the blocks are."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.triton.hashes.hash_kernels import (
    LANES,
    STRIPES,
    merge_pieces_kernel,
    sum_pieces_kernel,
)
from baton.engine.runner.triton.launching import launch

WORD_BYTES = 8
MIN_BLOCK_BYTES = 241  # xxh3 hashes shorter ones in other ways
PIECES_AT_ONCE = 8  # of a block, that one program sums
BLOCKS_AT_ONCE = 4  # that one warp merges
U64 = 1 << 64

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIMES_32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIMES_64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
START = (
    PRIMES_32[2], *PRIMES_64[:4], PRIMES_32[1], PRIMES_64[4], PRIMES_32[0],
)  # fmt: skip
LAST_OFFSET, MERGE_OFFSET = len(SECRET) - 64 - 7, 11  # in bytes of the secret


def make_block_hashes(kv: Tensor) -> TritonBlockHashes | None:
    """Return the kernels for this cache, or None if they cannot hash blocks of its size."""
    block_bytes = kv[0].numel() * kv.element_size()
    can_hash = block_bytes >= MIN_BLOCK_BYTES and block_bytes % WORD_BYTES == 0
    return TritonBlockHashes(kv) if can_hash else None


class TritonBlockHashes:
    """Implements `BlockHashes`: the numbers are those of `xxhash.xxh3_64_intdigest`."""

    def __init__(self, kv: Tensor) -> None:
        self._words = kv.flatten(1).view(torch.int64)
        self._block_words = self._words.shape[1]
        num_bytes = self._block_words * WORD_BYTES
        self._num_stripes = (num_bytes - 1) // (WORD_BYTES * LANES.value)
        self._num_pieces = self._num_stripes // STRIPES.value + 1  # the last one can be empty
        table = torch.from_numpy(_constants(num_bytes))
        self._table = table.to(kv.device)

    def __call__(self, block_ids: Tensor) -> Tensor:
        """Launch the hashes of these blocks. Bits of 64-bit integers."""
        num_blocks = len(block_ids)
        hashes = torch.empty_like(block_ids)
        sums = hashes.new_empty(num_blocks, self._num_pieces, LANES.value)
        grid = num_blocks, -(-self._num_pieces // PIECES_AT_ONCE)
        inputs = self._words, self._table, block_ids
        launch(
            sum_pieces_kernel,
            grid,
            sums,
            *inputs,
            self._block_words,
            self._num_pieces,
            self._num_stripes,
            pieces_at_once=PIECES_AT_ONCE,
        )
        launch(
            merge_pieces_kernel,
            (-(-num_blocks // BLOCKS_AT_ONCE),),
            hashes,
            *inputs,
            sums,
            self._block_words,
            self._num_pieces,
            num_blocks,
            blocks_at_once=BLOCKS_AT_ONCE,
            pieces_at_once=PIECES_AT_ONCE,
            num_warps=1,
        )
        return hashes


def _constants(block_bytes: int) -> np.ndarray:
    """Return the secret, its parts for the last stripe and the merge, and the first sums."""
    words = [
        *struct.unpack("<24Q", SECRET),
        *struct.unpack_from("<8Q", SECRET, LAST_OFFSET),
        *struct.unpack_from("<8Q", SECRET, MERGE_OFFSET),
        *START,
        block_bytes * PRIMES_64[0] % U64,
    ]
    return np.array(words, dtype=np.uint64).view(np.int64)
