"""Tiers of a KV cache in memory of a device, whose passes and copies land late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.kv_transfer.external_kv import FILE, HOST
from baton.kv_transfer.tiers import device_kv_access
from tests.support.block_stores import FolderWorld
from tests.support.device_kv import DeviceMemory
from tests.support.fake_streams import FakeCopyStream
from tests.support.tier_memory import BLOCK_BYTES, name_of
from tests.support.tier_world import NUM_KV_BLOCKS, TierWorld, tier_world

NEW = bytes(range(256)) * (BLOCK_BYTES // 256)


@contextmanager
def device_world(num_host: int = 16, folder: Path | None = None) -> Iterator[TierWorld]:
    files = None if folder is None else FolderWorld(folder).open()
    with tier_world(num_host, files, memory=DeviceMemory(NUM_KV_BLOCKS)) as it:
        yield it


def memory_of(it: TierWorld) -> DeviceMemory:
    assert isinstance(it.memory, DeviceMemory)
    return it.memory


def stream_of(it: TierWorld) -> FakeCopyStream:
    return memory_of(it).stream


def test_a_block_is_stored_as_the_pass_writes_it_that_has_not_landed() -> None:
    with device_world() as it:
        it.memory.write(1, NEW)
        it.store(1)
        assert it.load([1], into=5) == (HOST,)
        assert it.memory[5] == NEW


def test_a_stored_block_keeps_its_content_when_the_next_pass_writes_there() -> None:
    with device_world() as it:
        content = it.memory[1]
        it.store(1)
        it.memory.write(1, NEW)
        it.end_of(it.start_load([1], into=5))
        assert it.memory[5] == content


def test_a_block_is_loaded_after_the_passes_that_use_it() -> None:
    with device_world() as it:
        it.store(1)
        it.memory.write(5, NEW)  # of a request that has ended since
        assert it.load([1], into=5) == (HOST,)


@pytest.mark.parametrize("is_stored_in_files", [False, True])
def test_a_pass_after_a_load_reads_the_loaded_block(
    tmp_path: Path, is_stored_in_files: bool
) -> None:
    with device_world(folder=tmp_path) as it:
        it.store(1)
    with device_world(folder=tmp_path) as it:
        if not is_stored_in_files:
            it.store(1)
        it.memory.write(5, NEW)
        sources = it.end_of(it.start_load([1], into=5))
        assert it.memory[5] == it.memory[1]
        assert sources == (FILE if is_stored_in_files else HOST,)


def test_large_stores_are_copied_and_digested_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kv_access, "PIECE_BYTES", 2 * BLOCK_BYTES)
    with device_world() as it:
        num_before = stream_of(it).num_copies
        it.store(*range(1, 6))
        assert stream_of(it).num_copies - num_before == 3
        assert it.load(range(1, 6), into=8) == (HOST,) * 5


def test_a_block_of_host_memory_is_not_replaced_while_it_is_copied() -> None:
    with device_world(num_host=1) as it:
        it.store(1)
        found: list[object] = []

        def evict() -> None:
            it.host.remove(name_of(1))
            found.append(it.host.reserve())

        stream_of(it).on_copy = evict
        assert it.load([1], into=5) == (HOST,)
        assert found == [None]


def test_a_block_that_changed_in_host_memory_is_not_loaded() -> None:
    with device_world() as it:
        it.store(1, 2)
        block = it.host.pin(name_of(1))
        assert block is not None
        it.host.memory.view(block.slot)[7] ^= 1
        it.host.unpin(block)

        assert it.load([1, 2], into=5) == (None, HOST)


def test_a_store_that_fails_has_ended_with_all_of_its_copies() -> None:
    with device_world() as it:
        stream = stream_of(it)
        stream.fails_at_copy = stream.num_copies + 2
        it.store(1, 3, 5)  # no neighbours, so three copies
        assert stream.is_idle
        assert not any(map(it.holds, (1, 3, 5)))
        it.store(1, 3, 5)
        assert it.load([1, 3, 5], into=8) == (HOST,) * 3


def test_a_load_that_fails_has_ended_with_all_of_its_copies() -> None:
    with device_world() as it:
        it.store(1, 2, 3)
        stream = stream_of(it)
        stream.fails_at_copy = stream.num_copies + 2
        number = it.start_load([3, 2, 1], into=8)
        assert it.end_of(number) == (None,) * 3
        assert stream.is_idle
        it.memory.write(8, NEW)  # the block has another use now
        assert it.memory[8] == NEW
        assert it.load([3, 2, 1], into=8) == (HOST,) * 3


def test_a_file_that_cannot_be_copied_to_the_device_is_not_loaded(tmp_path: Path) -> None:
    with device_world(folder=tmp_path) as it:
        it.store(1, 2)
    with device_world(folder=tmp_path) as it:
        stream = stream_of(it)
        stream.fails_at_copy = stream.num_copies + 1
        assert it.load([1, 2], into=5) == (None, FILE)
        assert it.load([1, 2], into=5) == (FILE, HOST)


def test_a_node_that_ends_meanwhile_ends_its_copies(tmp_path: Path) -> None:
    with device_world(folder=tmp_path) as it:
        it.store(1)
        it.memory.write(2, NEW)
        it.start_store(2, 3)
        it.start_load([1], into=5)
    # The world has checked that no copy is in progress, and that no memory is pinned.
    assert it.memory[5] == it.memory[1]
    with device_world(folder=tmp_path) as again:
        assert again.end_of(again.start_load([2, 3], into=5)) == (FILE, FILE)
        assert (again.memory[5], again.memory[6]) == (NEW, it.memory[3])


def test_more_files_are_read_than_there_are_staging_blocks(tmp_path: Path) -> None:
    blocks = range(NUM_KV_BLOCKS)
    with device_world(folder=tmp_path) as it:
        it.store(*blocks)
        contents = [it.memory[block] for block in blocks]
    with device_world(num_host=2, folder=tmp_path) as it:
        for block in blocks:
            it.memory.wipe(block)
        assert it.end_of(it.start_load(blocks, into=0)) == (FILE,) * NUM_KV_BLOCKS
        assert [it.memory[block] for block in blocks] == contents
