"""Copies of blocks with digests: those of each kernel variant, and those without kernels."""

from __future__ import annotations

import ctypes
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from baton.engine.runner.kernels.calls import MIN_BLOCK_BYTES, NativeCopies, fastest_copies
from baton.kv_transfer.tiers.kv_access import BlockMemory, CopyBlocks, copy_blocks
from tests.support.hypothesis_profiles import num_examples
from tests.support.kernels import kernels_by_variant

NATIVE = {
    name: NativeCopies(kernels.library.baton_copy_blocks)
    for name, kernels in kernels_by_variant().items()
}
COPIES: dict[str, CopyBlocks] = {"python": copy_blocks, **NATIVE}
each_way = pytest.mark.parametrize("copies", COPIES.values(), ids=COPIES.keys())

NUM_BLOCKS = 5


def random_memory(block_bytes: int, offset: int, seed: int) -> tuple[BlockMemory, bytearray]:
    """Return blocks that begin `offset` bytes after a multiple of 64, and all bytes around them."""
    content = bytearray(random.Random(seed).randbytes(NUM_BLOCKS * block_bytes + 256))
    start = ctypes.addressof(ctypes.c_char.from_buffer(content))
    address = (start + 63) // 64 * 64 + 64 + offset
    return BlockMemory(address, NUM_BLOCKS, block_bytes), content


@each_way
@settings(max_examples=num_examples(100))
@given(
    block_bytes=st.integers(MIN_BLOCK_BYTES, 5000),
    offsets=st.tuples(st.integers(0, 63), st.integers(0, 63)),
    pairs=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS, unique=True),
    seed=st.integers(0, 1000),
)
@example(block_bytes=4096, offsets=(0, 0), pairs=[3, 1], seed=0)
@example(block_bytes=1024, offsets=(5, 0), pairs=[0, 4], seed=1)
@example(block_bytes=3136, offsets=(0, 0), pairs=[0, 1, 2, 3, 4], seed=2)
def test_copies_are_complete_and_have_xxhash_digests(
    copies: CopyBlocks, block_bytes: int, offsets: tuple[int, int], pairs: list[int], seed: int
) -> None:
    source, _kept = random_memory(block_bytes, offsets[0], seed)
    target, around = random_memory(block_bytes, offsets[1], seed + 1)
    expected = bytearray(around)
    start = target.address - ctypes.addressof(ctypes.c_char.from_buffer(around))
    into = list(reversed(range(NUM_BLOCKS)))[: len(pairs)]
    for block, place in zip(pairs, into, strict=True):
        first = start + place * block_bytes
        expected[first : first + block_bytes] = source.view(block)

    digests = copies(source, pairs, target, into)

    assert digests == [xxh3_128_digest(source.view(block)) for block in pairs]
    assert around == expected


@each_way
def test_a_large_block_is_copied(copies: CopyBlocks) -> None:
    source, _kept = random_memory(1 << 20, 0, 1)
    target, _other = random_memory(1 << 20, 0, 2)
    assert copies(source, [2], target, [4]) == [target.digest(4)] == [source.digest(2)]
    assert bytes(target.view(4)) == bytes(source.view(2))


@each_way
@pytest.mark.parametrize("block", [-1, NUM_BLOCKS])
def test_blocks_outside_the_memory_are_refused(copies: CopyBlocks, block: int) -> None:
    source, _kept = random_memory(4096, 0, 1)
    target, _other = random_memory(4096, 0, 2)
    for blocks, into in (([block], [0]), ([0], [block])):
        with pytest.raises(IndexError, match="of 5"):
            copies(source, blocks, target, into)


def test_blocks_that_are_too_small_for_the_kernel_are_copied_without_it() -> None:
    assert fastest_copies(MIN_BLOCK_BYTES - 1) is copy_blocks
