from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from baton.kv_transfer.transports.dead_segments import remove_dead_segments

NUM_BYTES = 8192


def make_segment(folder: Path, name: str = "ucx_shm_posix_4acdb", age_s: float = 60) -> Path:
    path = folder / name
    path.write_bytes(bytes(NUM_BYTES))
    set_age(path, age_s)
    return path


def set_age(path: Path, age_s: float) -> None:
    changed_s = time.time() - age_s
    os.utime(path, (changed_s, changed_s))


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def test_a_segment_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    make_segment(tmp_path)
    make_segment(tmp_path, "ucx_shm_posix_2cc02791")

    assert remove_dead_segments(tmp_path) == 2
    assert not list(tmp_path.iterdir())


def test_an_open_segment_is_kept_until_it_is_closed(tmp_path: Path) -> None:
    path = make_segment(tmp_path)

    with opened(path):
        assert remove_dead_segments(tmp_path) == 0

    assert remove_dead_segments(tmp_path) == 1


def test_a_mapped_segment_is_kept_although_its_file_is_closed(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    with opened(path) as file:
        memory = mmap.mmap(file, NUM_BYTES)

    with memory:
        assert remove_dead_segments(tmp_path) == 0

    assert remove_dead_segments(tmp_path) == 1


def test_a_new_segment_is_kept(tmp_path: Path) -> None:
    path = make_segment(tmp_path, age_s=0)
    set_age(path, -60)

    assert remove_dead_segments(tmp_path) == 0


def test_a_node_waits_while_another_one_checks_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_segment(tmp_path)
    with ExitStack() as other_node:
        fcntl.flock(other_node.enter_context(opened(tmp_path, os.O_RDONLY)), fcntl.LOCK_EX)
        other_node.enter_context(opened(path))
        monkeypatch.setattr(time, "sleep", lambda _: other_node.close())

        assert remove_dead_segments(tmp_path) == 1


def test_a_folder_that_stays_locked_does_not_block_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_segment(tmp_path)
    monkeypatch.setattr(time, "sleep", lambda _: None)

    with opened(tmp_path, os.O_RDONLY) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)
        assert remove_dead_segments(tmp_path) == 1


def test_other_files_are_kept(tmp_path: Path) -> None:
    make_segment(tmp_path, "ucx_shm_posix_xyz")
    make_segment(tmp_path, "psm_4acdb")
    (tmp_path / "ucx_shm_posix_1").mkdir()
    os.mkfifo(tmp_path / "ucx_shm_posix_2")
    before = sorted(tmp_path.iterdir())

    assert remove_dead_segments(tmp_path) == 0
    assert sorted(tmp_path.iterdir()) == before


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    target = make_segment(tmp_path)
    (shared / target.name).symlink_to(target)

    assert remove_dead_segments(shared) == 0
    assert target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_segments_of_other_users_are_kept(tmp_path: Path) -> None:
    path = make_segment(tmp_path)
    os.chown(path, 12345, -1)

    assert remove_dead_segments(tmp_path) == 0
    assert path.exists()


def test_a_system_without_the_folder_has_no_segments(tmp_path: Path) -> None:
    assert remove_dead_segments(tmp_path / "shm") == 0
