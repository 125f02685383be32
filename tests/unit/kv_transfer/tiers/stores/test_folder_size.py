"""The size of a KV folder counts the blocks of all models and versions that use it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from time import time

import pytest

from baton.kv_transfer.tiers.stores.file_store import FileStore
from baton.kv_transfer.tiers.stores.journal_files import JOURNAL_AGE_S
from baton.kv_transfer.tiers.stores.other_namespaces import LIST_PAUSE_S
from tests.support.block_stores import STORED_BYTES
from tests.support.tier_memory import BLOCK_BYTES, OwnedMemory, name_of

FOUR_BLOCKS = 4 * STORED_BYTES
OLD_S = 2 * JOURNAL_AGE_S


class Clock:
    """Wall clock that a test can advance."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return time() + self.passed_s


def tier(
    folder: Path, model: str, clock: Callable[[], float] = time, max_bytes: int = FOUR_BLOCKS
) -> FileStore:
    files = FileStore(str(folder), model, BLOCK_BYTES, max_bytes, clock=clock)
    files.scan()
    return files


def write(files: FileStore, numbers: Iterable[int]) -> None:
    memory = OwnedMemory(16)
    for number in numbers:
        digest = memory.blocks.digest(number)
        files.write(name_of(number), memory.blocks, number, digest)


def held(files: FileStore, numbers: Iterable[int]) -> list[bool]:
    return [files.holds(name_of(number)) for number in numbers]


def namespaces(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()]


def num_blocks(folder: Path) -> int:
    return len(list(folder.glob("*/??/*.kv")))


def age(namespace: Path, numbers: Iterable[int] = ()) -> None:
    """Let a namespace look as if no process had used it for long; the oldest block comes first."""
    now_s = time()
    for place, number in enumerate(numbers):
        [path] = namespace.glob(f"??/{name_of(number).hex()}.kv")
        os.utime(path, (now_s - OLD_S + place,) * 2)
    for path in (*(namespace / "journals").iterdir(), namespace):
        os.utime(path, (now_s - OLD_S,) * 2)


def unused(folder: Path, numbers: list[int]) -> Path:
    """Make a namespace that a process of another version has left behind."""
    write(tier(folder, "before"), numbers)
    [namespace] = namespaces(folder)
    age(namespace, numbers)
    return namespace


def list_others(files: FileStore, clock: Clock) -> None:
    clock.passed_s += LIST_PAUSE_S
    for _ in range(300):  # a subfolder each
        files.refresh()


def test_the_oldest_unused_blocks_of_another_version_are_evicted_first(tmp_path: Path) -> None:
    before = unused(tmp_path, [3, 1, 2])

    write(tier(tmp_path, "after"), [4, 5, 6])

    assert num_blocks(tmp_path) == 4
    assert [path.stem for path in before.glob("??/*.kv")] == [name_of(2).hex()]


def test_unused_blocks_of_another_version_are_kept_while_space_is_free(tmp_path: Path) -> None:
    unused(tmp_path, [1, 2])
    write(tier(tmp_path, "after"), [4, 5])

    assert held(tier(tmp_path, "before"), [1, 2]) == [True, True]


def test_the_folder_of_a_version_is_removed_after_its_last_block(tmp_path: Path) -> None:
    before = unused(tmp_path, [1, 2])
    clock = Clock()
    after = tier(tmp_path, "after", clock)
    write(after, [4, 5, 6, 7])
    age(before)

    list_others(after, clock)

    assert not before.exists()
    assert held(after, [4, 5, 6, 7]) == [True] * 4


def test_a_newly_created_folder_is_not_removed(tmp_path: Path) -> None:
    starting = tmp_path / ("0" * 32)
    starting.mkdir()

    tier(tmp_path, "model")

    assert starting.exists()


def test_blocks_of_a_model_in_use_are_not_evicted(tmp_path: Path) -> None:
    other = tier(tmp_path, "other")
    write(other, [1, 2])

    files = tier(tmp_path, "model")
    write(files, [4, 5, 6, 7])

    assert held(files, [4, 5, 6, 7]) == [False, False, True, True]
    assert held(other, [1, 2]) == [True, True]
    assert num_blocks(tmp_path) == 4


def test_two_models_share_the_folder_equally_regardless_of_order(tmp_path: Path) -> None:
    clock = Clock()
    first = tier(tmp_path, "first", clock)
    write(first, [1, 2, 3, 4])
    second = tier(tmp_path, "second", clock)
    write(second, [5, 6, 7])

    list_others(first, clock)
    list_others(second, clock)

    assert held(first, [1, 2, 3, 4]) == [False, False, True, True]
    assert held(second, [5, 6, 7]) == [False, True, True]


def test_a_version_that_a_node_uses_again_keeps_its_blocks(tmp_path: Path) -> None:
    unused(tmp_path, [1, 2])
    after = tier(tmp_path, "after")
    before = tier(tmp_path, "before")  # a rollback, since the folder was listed

    write(after, [4, 5, 6, 7])

    assert held(before, [1, 2]) == [True, True]
    assert num_blocks(tmp_path) == 4


def test_a_folder_that_cannot_be_listed_hides_no_other_blocks(tmp_path: Path) -> None:
    write(tier(tmp_path, "model"), [1])
    foreign = tmp_path / ("0" * 32)
    foreign.mkdir()
    (foreign / "journals").touch()

    assert held(tier(tmp_path, "model"), [1]) == [True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_blocks_of_another_user_are_not_evicted(tmp_path: Path) -> None:
    before = unused(tmp_path, [1, 2])
    os.chown(before, 65534, -1)

    write(tier(tmp_path, "after"), [4, 5, 6, 7])

    assert len(list(before.glob("??/*.kv"))) == 2


def test_symbolic_links_in_place_of_journals_are_not_followed(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "kv"
    elsewhere.mkdir()
    before = folder / ("0" * 32)
    before.mkdir(parents=True)
    (before / "journals").symlink_to(elsewhere)
    (elsewhere / "1-01234567.00000000").write_text("mine")
    age(before)

    tier(folder, "after")

    assert list(elsewhere.iterdir())


def test_files_that_are_not_blocks_are_kept_and_symbolic_links_are_not_followed(
    tmp_path: Path,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    folder = tmp_path / "kv"
    before = unused(folder, [1])
    [block] = before.glob("??/*.kv")
    for name in ("notes.kv", ".kv", "cafe.kv", f"{'ab' * 16}.kv"):
        (block.parent / name).write_text("mine")
    (before / "journals" / "notes").write_text("mine")
    (before / "notes").write_text("mine")
    (folder / "notes").mkdir()
    linked = Path(elsewhere / "ab")
    linked.mkdir(parents=True)
    (linked / f"{name_of(2).hex()}.kv").write_bytes(bytes(STORED_BYTES))
    (folder / ("0" * 32)).symlink_to(elsewhere)
    age(before)
    clock = Clock()

    files = tier(folder, "after", clock)
    write(files, [4, 5, 6, 7])
    list_others(files, clock)

    assert not block.exists()
    assert len(list(block.parent.iterdir())) == 4
    assert (before / "journals" / "notes").exists()
    assert (before / "notes").exists()
    assert (folder / "notes").exists()
    assert list(linked.iterdir())
