"""Properties of files alone. tests/contract/test_block_stores.py has the rest."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from errno import ENOSPC, EROFS
from pathlib import Path
from time import time
from typing import Any

import pytest

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockName
from baton.core.kv_hints import NO_HINTS, BlockHints, tenant_of
from baton.kv_transfer.tiers.stores import file_store, journal_files
from baton.kv_transfer.tiers.stores.block_file import write_block
from baton.kv_transfer.tiers.stores.block_store import BlockUnusable
from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.journal_files import BEAT_S
from tests.support.block_stores import LIMIT, STORED_BYTES, FolderWorld
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory, name_of

NUM_ON_DISK = 4


def tier(
    folder: Path,
    *,
    max_bytes: int = LIMIT,
    tenant_share: float = 1.0,
    clock: Callable[[], float] = time,
) -> FileStore:
    files = FileStore(str(folder), "model", BLOCK_BYTES, max_bytes, tenant_share, clock)
    files.scan()
    return files


def write(files: FileStore, memory: OwnedMemory, number: int, hints: BlockHints = NO_HINTS) -> None:
    digest = memory.blocks.digest(number)
    files.write(name_of(number), memory.blocks, number, digest, hints)


def held(files: FileStore, *numbers: int) -> list[bool]:
    return [files.holds(name_of(number)) for number in numbers]


def file_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"*/??/{name_of(number).hex()}.kv")
    return path


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Limit the size of files that this process writes: a write beyond it fails or is short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def make_read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function after which calls that write to a disk fail as on one that is read-only."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(EROFS, "Read-only file system")

    def open_to_read(path: str, flags: int, *more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return open_any(path, flags, *more)

    def apply() -> None:
        monkeypatch.setattr(os, "open", open_to_read)
        for name in ("utime", "unlink", "rename", "replace"):
            monkeypatch.setattr(os, name, refuse)

    open_any = os.open
    return apply


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder on a disk with room for the files of NUM_ON_DISK blocks."""

    def write_if_there_is_room(path: Path, part: Path, *block: Any) -> None:
        if len(list(tmp_path.glob("*/??/*"))) >= NUM_ON_DISK:
            raise OSError(ENOSPC, "No space left on device")
        write_block(path, part, *block)

    monkeypatch.setattr(file_store, "write_block", write_if_there_is_room)
    return tmp_path


def test_other_users_cannot_read_the_files(tmp_path: Path) -> None:
    tier(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
@pytest.mark.parametrize("name", ["kv", "kv/below"])
def test_a_folder_owned_by_another_user_is_refused(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / name).mkdir(parents=True)
    os.chown(tmp_path / "kv", 4242, 4242)
    with pytest.raises(InvalidConfig, match=r"user 4242: name a folder of your own"):
        tier(tmp_path / name)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(InvalidConfig, match=r"chmod go-w, or name a new folder in it"):
        tier(tmp_path)
    tier(tmp_path / "kv")


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    files = tier(tmp_path)
    for number in (1, 2, 3):
        write(files, memory, number)
        os.utime(file_of(tmp_path, number), (number, number))
    assert files.read(name_of(1), memory.blocks, 0) is not None  # the latest use

    again = tier(tmp_path, max_bytes=2 * STORED_BYTES)

    assert [again.holds(name_of(number)) for number in (1, 2, 3)] == [True, False, True]


def test_retention_survives_reads_and_a_restart_and_then_ends(tmp_path: Path) -> None:
    memory = OwnedMemory(6)
    files = tier(tmp_path)
    write(files, memory, 1, BlockHints(retain_s=3600.0))
    write(files, memory, 2)
    assert files.read(name_of(1), memory.blocks, 0) is not None

    again = tier(tmp_path, max_bytes=2 * STORED_BYTES)
    write(again, memory, 3)
    write(again, memory, 4)
    assert held(again, 1, 2, 3, 4) == [True, False, False, True]

    later = tier(tmp_path, max_bytes=2 * STORED_BYTES, clock=lambda: time() + 3601.0)
    write(later, memory, 5)
    write(later, memory, 3)
    assert held(later, 1, 3, 5) == [False, True, True]


def test_a_block_retained_by_another_process_is_kept(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    one, other = tier(tmp_path), tier(tmp_path, max_bytes=2 * STORED_BYTES)
    write(one, memory, 1)
    write(one, memory, 2)
    other.refresh()
    one.use([name_of(1)], BlockHints(retain_s=3600.0))

    write(other, memory, 3)

    assert held(other, 1, 2, 3) == [True, False, True]


def test_a_released_block_is_evicted_first_also_after_a_restart(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    files = tier(tmp_path)
    write(files, memory, 1)
    write(files, memory, 2)
    files.use([name_of(2)], BlockHints(is_released=True))

    again = tier(tmp_path, max_bytes=2 * STORED_BYTES)
    write(again, memory, 3)

    assert held(again, 1, 2, 3) == [True, False, True]


def test_priorities_survive_reads_and_a_restart(tmp_path: Path) -> None:
    memory = OwnedMemory(7)
    files = tier(tmp_path)
    write(files, memory, 1, BlockHints(priority=80))
    write(files, memory, 2)
    write(files, memory, 3, BlockHints(priority=0))
    files.use([name_of(2)], BlockHints(priority=90))
    assert files.read(name_of(1), memory.blocks, 0) is not None
    assert files.read(name_of(3), memory.blocks, 0) is not None

    again = tier(tmp_path, max_bytes=3 * STORED_BYTES)
    assert [again.hints_of(name_of(number)).priority for number in (1, 2, 3)] == [80, 90, 0]
    for number in (4, 5):
        write(again, memory, number)

    assert held(again, 1, 2, 3, 4, 5) == [True, True, False, False, True]
    third = tier(tmp_path)  # a scan changes no times
    assert [third.hints_of(name_of(number)).priority for number in (1, 2, 5)] == [80, 90, 35]


def test_a_priority_reset_to_the_default_survives_a_restart(tmp_path: Path) -> None:
    files = tier(tmp_path)
    write(files, OwnedMemory(2), 1, BlockHints(priority=80))
    files.use([name_of(1)], BlockHints(priority=35))

    assert tier(tmp_path).hints_of(name_of(1)).priority == 35


def test_a_retained_block_keeps_its_priority_over_a_restart(tmp_path: Path) -> None:
    files = tier(tmp_path)
    write(files, OwnedMemory(2), 1, BlockHints(priority=80, retain_s=3600.0))

    hints = tier(tmp_path).hints_of(name_of(1))

    assert hints.priority == 80
    assert 3590.0 < hints.retain_s <= 3600.0


def test_hints_apply_to_a_block_that_another_process_wrote_first(tmp_path: Path) -> None:
    memory = OwnedMemory(2)
    one, other = tier(tmp_path), tier(tmp_path)
    write(one, memory, 1)
    write(other, memory, 1, BlockHints(priority=80))

    assert tier(tmp_path).hints_of(name_of(1)).priority == 80


def test_a_priority_raised_by_another_process_applies(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    one, other = tier(tmp_path), tier(tmp_path, max_bytes=2 * STORED_BYTES)
    write(one, memory, 1)
    write(one, memory, 2)
    other.refresh()
    one.use([name_of(1)], BlockHints(priority=80))

    write(other, memory, 3)

    assert held(other, 1, 2, 3) == [True, False, True]


def test_the_quota_of_a_tenant_holds_after_a_restart(tmp_path: Path) -> None:
    memory = OwnedMemory(7)
    files = tier(tmp_path)
    tenant = BlockHints(tenant_of("a salt"))
    write(files, memory, 1)
    for number in (2, 3, 4):
        write(files, memory, number, tenant)
        os.utime(tmp_path / files._path_of(name_of(number)), (number, number))

    again = tier(tmp_path, max_bytes=4 * STORED_BYTES, tenant_share=0.5)
    assert held(again, 1, 2, 3, 4) == [True, False, True, True]
    assert again.read(name_of(3), memory.blocks, 0) is not None
    write(again, memory, 5, tenant)

    assert held(again, 1, 3, 4, 5) == [True, True, False, True]
    assert not [path for path in tmp_path.rglob("*") if "salt" in path.name]


def unopened(folder: Path) -> FileStore:
    return FileStore(str(folder), "model", BLOCK_BYTES, LIMIT)


def test_an_unusable_folder_is_used_once_it_works(tmp_path: Path) -> None:
    memory, path = OwnedMemory(2), tmp_path / "folder"
    path.touch()
    files = unopened(path)
    for attempt in (
        files.scan,
        files.refresh,
        files.clear,
        lambda: files.remove(name_of(1)),
        lambda: write(files, memory, 1),
    ):
        with pytest.raises(NotADirectoryError, match="folder"):
            attempt()
    path.unlink()

    files.scan()
    write(files, memory, 1)

    assert tier(path).read(name_of(1), memory.blocks, 0) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders of others")
def test_a_folder_created_by_another_user_after_the_start_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.touch()
    files = unopened(path)
    path.unlink()
    path.mkdir()
    os.chown(path, 4242, 4242)

    for attempt in (files.scan, files.refresh, lambda: write(files, OwnedMemory(2), 1)):
        with pytest.raises(PermissionError, match="user 4242: name a folder of your own"):
            attempt()
    assert not list(path.rglob("journals/*"))


@pytest.mark.parametrize("num_bytes", [0, 7, STORED_BYTES - 1])
def test_a_failed_write_leaves_no_file(tmp_path: Path, num_bytes: int) -> None:
    memory = OwnedMemory(3)
    files = tier(tmp_path)
    write(files, memory, 2)
    with files_limited_to(num_bytes), pytest.raises(OSError, match="File too large"):
        write(files, memory, 1)
    assert not files.holds(name_of(1))
    assert FolderWorld(tmp_path).stored() == {name_of(2).hex()}
    assert not list(tmp_path.glob("*/??/*.part"))
    write(files, memory, 1)
    assert files.read(name_of(1), memory.blocks, 0) is not None


def test_the_file_of_an_interrupted_write_is_not_a_block_and_is_deleted_later(
    tmp_path: Path,
) -> None:
    write(tier(tmp_path), OwnedMemory(2), 1)
    folder = file_of(tmp_path, 1).parent
    old, new = folder / "1-killed.part", folder / "2-writing.part"
    for path in (old, new):
        path.write_bytes(file_of(tmp_path, 1).read_bytes()[:1000])
    os.utime(old, (1, 1))

    assert len(tier(tmp_path).order) == 1
    assert [path.name for path in folder.glob("*.part")] == ["2-writing.part"]


def test_an_emptied_folder_is_used_again(tmp_path: Path) -> None:
    memory = OwnedMemory(3)
    files = tier(tmp_path)
    write(files, memory, 1)
    for path in tmp_path.iterdir():
        shutil.rmtree(path)

    assert files.read(name_of(1), memory.blocks, 0) is None
    files.refresh()
    write(files, memory, 2)
    assert tier(tmp_path).read(name_of(2), memory.blocks, 0) is not None


def make_unreadable(path: Path) -> None:
    path.unlink()
    path.mkdir()


def test_an_unreadable_file_fails_only_once(tmp_path: Path) -> None:
    memory = OwnedMemory(2)
    files = tier(tmp_path)
    write(files, memory, 1)
    make_unreadable(file_of(tmp_path, 1))

    with pytest.raises(BlockUnusable, match=r"Is a directory.*\.kv"):
        files.read(name_of(1), memory.blocks, 0)
    assert not files.holds(name_of(1))


def test_unreadable_files_in_a_row_cost_only_their_blocks(tmp_path: Path) -> None:
    memory = OwnedMemory(7)
    files = tier(tmp_path)
    for number in range(1, 7):
        write(files, memory, number)
    for number in (1, 2, 3, 5, 6):
        make_unreadable(file_of(tmp_path, number))

    for number in (1, 2, 3, 5, 6):
        with pytest.raises(BlockUnusable):
            files.read(name_of(number), memory.blocks, 0)
    assert files.read(name_of(4), memory.blocks, 0) is not None


def test_an_error_of_all_files_is_one_of_the_folder(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    files = tier(tmp_path)
    for number in range(1, 4):
        write(files, memory, number)
        path = file_of(tmp_path, number)
        path.unlink()
        path.symlink_to("/proc/self/mem")  # reads of its start fail with EIO

    with pytest.raises(OSError, match="Input/output error") as raised:
        files.read(name_of(1), memory.blocks, 0)
    assert not isinstance(raised.value, BlockUnusable)


def test_a_file_in_place_of_a_subfolder_only_costs_the_blocks_of_that(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    files = tier(tmp_path)
    write(files, memory, 1)
    file_of(tmp_path, 1).parents[1].joinpath("ab").touch()
    in_it = BlockName(b"\xab" + name_of(2)[1:])

    again = tier(tmp_path)

    with pytest.raises(BlockUnusable, match="File exists"):
        again.write(in_it, memory.blocks, 2, memory.blocks.digest(2))
    write(again, memory, 3)
    assert held(again, 1, 3) == [True, True]
    again.remove(in_it)
    again.clear()
    assert FolderWorld(tmp_path).stored() == set()


def test_blocks_are_evicted_while_the_disk_is_full(small_disk: Path) -> None:
    """Others use it, too, so that the limit of the folder is beyond the end of the disk."""
    memory = OwnedMemory(12)
    files = tier(small_disk)
    write(files, memory, 1, BlockHints(retain_s=3600.0))
    for number in range(2, 12):
        write(files, memory, number)

    newest = range(12 - (NUM_ON_DISK - 1), 12)
    assert [number for number in range(1, 12) if files.holds(name_of(number))] == [1, *newest]
    assert FolderWorld(small_disk).stored() == {name_of(number).hex() for number in (1, *newest)}
    assert files.order.num_evicted == 11 - NUM_ON_DISK
    assert tier(small_disk).read(name_of(11), memory.blocks, 0) is not None


def test_a_full_disk_without_blocks_to_evict_is_an_error(small_disk: Path) -> None:
    memory = OwnedMemory(12)
    files = tier(small_disk)
    for number in range(NUM_ON_DISK):
        write(files, memory, number, BlockHints(retain_s=3600.0))
    with pytest.raises(OSError, match="No space left"):
        write(files, memory, 9)
    assert len(FolderWorld(small_disk).stored()) == NUM_ON_DISK


def journals_of(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*/journals/*") if path.is_file()]


def make_old(paths: Iterable[Path], days: float = 2.0) -> None:
    old_s = time() - days * 86_400
    for path in paths:
        os.utime(path, (old_s, old_s))


def test_nodes_see_each_others_blocks_after_a_day_without_changes(tmp_path: Path) -> None:
    memory, ahead_s = OwnedMemory(4), 0.0
    one = tier(tmp_path, clock=lambda: time() + ahead_s)
    other = tier(tmp_path)
    write(one, memory, 1)
    other.refresh()
    make_old(journals_of(tmp_path))
    ahead_s = 86_400.0
    one.refresh()
    third = tier(tmp_path)
    third.refresh()

    write(one, memory, 2)

    for each in (other, third):
        each.refresh()
        assert held(each, 1, 2) == [True, True]


def test_changes_of_a_node_with_a_deleted_journal_are_read_when_it_writes_again(
    tmp_path: Path,
) -> None:
    memory = OwnedMemory(4)
    one, other = tier(tmp_path), tier(tmp_path)
    write(one, memory, 1)
    other.refresh()
    for path in journals_of(tmp_path):
        path.unlink()

    write(one, memory, 2)
    other.refresh()

    assert held(other, 1, 2) == [True, True]


def test_journals_do_not_grow_without_limit_and_lose_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_files, "MAX_JOURNAL_BYTES", 500)
    memory, ahead_s = OwnedMemory(4), 0.0
    one = tier(tmp_path, max_bytes=2 * STORED_BYTES, clock=lambda: time() + ahead_s)
    other = tier(tmp_path)
    for number in range(100):
        write(one, memory, number % 3)
        if number % 10 == 0:
            other.refresh()
            assert held(other, 0, 1, 2) == held(one, 0, 1, 2)
        if number % 30 == 0:
            make_old(journals_of(tmp_path))
            ahead_s += 3600.0
            one.refresh()
            assert sum(path.stat().st_size for path in journals_of(tmp_path)) <= 600


def test_a_resumed_node_lists_blocks_whose_journals_were_deleted(
    tmp_path: Path,
) -> None:
    memory, ahead_s = OwnedMemory(4), 0.0
    one, other = tier(tmp_path), tier(tmp_path, clock=lambda: time() + ahead_s)
    write(one, memory, 1)
    other.refresh()
    write(one, memory, 2)
    one.remove(name_of(1))
    for path in journals_of(tmp_path):
        path.unlink()

    ahead_s = 3600.0
    other.refresh()

    assert held(other, 1, 2) == [False, True]


def test_journal_changes_that_fail_on_a_full_disk_are_written_later(tmp_path: Path) -> None:
    memory = OwnedMemory(4)
    one, other = tier(tmp_path), tier(tmp_path)
    write(one, memory, 1)
    other.refresh()
    with files_limited_to(0), pytest.raises(OSError, match="File too large"):
        one.remove(name_of(1))

    one.refresh()
    other.refresh()

    assert held(one, 1) == held(other, 1) == [False]


def test_a_folder_that_becomes_read_only_is_still_read(
    tmp_path: Path, make_read_only: Callable[[], None]
) -> None:
    """Neither the beat of the journal nor a change to publish ends reads."""
    memory, now = OwnedMemory(4), time()
    one = tier(tmp_path, clock=lambda: now)
    write(one, memory, 1)
    write(one, memory, 2)
    with files_limited_to(0), pytest.raises(OSError, match="File too large"):
        one.remove(name_of(2))
    make_read_only()
    now += 2 * BEAT_S

    one.refresh()

    assert held(one, 1, 2) == [True, False]
    assert one.read(name_of(1), memory.blocks, 0) is not None
    with pytest.raises(OSError, match="Read-only"):
        write(one, memory, 3)


def test_a_journal_deleted_while_reading_is_no_error(tmp_path: Path) -> None:
    """Processes come and go between the listing of the journals and their reading."""
    files = tier(tmp_path)
    (journals,) = tmp_path.glob("*/journals")
    (journals / "gone").symlink_to(journals / "nowhere")
    files.refresh()
    tier(tmp_path)
