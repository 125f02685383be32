from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from baton.kv_transfer.tiers.copy_pace import PACED_BYTES, CopyPace
from baton.kv_transfer.tiers.host_growth import FirstTouch
from baton.kv_transfer.tiers.kv_access import BlockMemory

BLOCK_BYTES = 1 << 16
NUM_BLOCKS = 3 * PACED_BYTES // BLOCK_BYTES + 1
WAIT_S = 30.0


@contextmanager
def unmapped_memory() -> Iterator[tuple[mmap.mmap, BlockMemory]]:
    """Memory of which no page is mapped yet."""
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    yield memory, BlockMemory(address, NUM_BLOCKS, BLOCK_BYTES)


def mapped_pages(memory: BlockMemory) -> int:
    num_pages = memory.num_blocks * memory.block_bytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), 8 * num_pages, 8 * (memory.address // mmap.PAGESIZE))
    return int(np.count_nonzero(np.frombuffer(entries, np.uint64) >> np.uint64(63)))


@pytest.mark.parametrize("is_decoding", [False, True])
def test_all_pages_are_mapped_and_keep_their_content(is_decoding: bool) -> None:
    pace = CopyPace(cpu_clock=lambda: 0.0)
    pace.set_decoding(is_decoding)
    with unmapped_memory() as (content, memory):
        content[5000:5005] = b"baton"
        before = mapped_pages(memory)

        with FirstTouch(memory, pace) as first_touch:
            first_touch.allow(NUM_BLOCKS)
            assert first_touch.wait(WAIT_S)

        assert before < mapped_pages(memory) == NUM_BLOCKS * BLOCK_BYTES // mmap.PAGESIZE
        assert content[5000:5005] == b"baton"
        assert not any(content[5005:])


def test_no_page_is_mapped_before_a_block_may_be_used() -> None:
    with unmapped_memory() as (_, memory):
        before = mapped_pages(memory)
        with FirstTouch(memory, CopyPace()) as first_touch:
            assert not first_touch.wait(0)

        assert mapped_pages(memory) == before


def test_closing_does_not_wait_for_a_pause() -> None:
    cpu_s = iter(range(1000))
    pace = CopyPace(cpu_clock=lambda: float(next(cpu_s)))  # each piece takes a second of CPU time
    pace.set_decoding(True)
    with unmapped_memory() as (_, memory):
        first_touch = FirstTouch(memory, pace)
        with first_touch:
            first_touch.allow(NUM_BLOCKS)
            assert not first_touch.wait(0)

        assert first_touch.wait(0)
        assert mapped_pages(memory) < NUM_BLOCKS * BLOCK_BYTES // mmap.PAGESIZE


def test_memory_that_is_smaller_than_a_page_is_left_alone() -> None:
    owner = ctypes.create_string_buffer(64)
    with FirstTouch(BlockMemory(ctypes.addressof(owner), 4, 16), CopyPace()) as first_touch:
        assert first_touch.wait(WAIT_S)
    assert owner.raw == bytes(64)
