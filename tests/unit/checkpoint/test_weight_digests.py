"""Digests of weights: kept for the next start, and forgotten when a file changes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.checkpoint.weight_digests import MIN_AGE_S, DigestCache
from baton.checkpoint.weight_files import WeightFiles

OTHER = "0" * 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_weights(folder)
    return folder


def save_weights(folder: Path, last: float = 2.0) -> None:
    tensors = {
        "embedding": torch.arange(40.0).reshape(8, 5).bfloat16(),
        "scale": torch.tensor(last),
        "none": torch.empty(0, 4),
    }
    save_file(tensors, folder / "model.safetensors")


def a_cache(tmp_path: Path, *, age_s: float = MIN_AGE_S, min_bytes: int = 0) -> DigestCache:
    return DigestCache(tmp_path / "cache", lambda: time.time() + age_s, min_bytes)


def digest(folder: Path, cache: DigestCache) -> str:
    with WeightFiles(folder, cache) as files:
        return files.digest()


def kept_files(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache").glob("*"))


def falsify(tmp_path: Path) -> None:
    """Replace the digests that are kept, so that their use shows."""
    [path] = kept_files(tmp_path)
    kept = json.loads(path.read_text())
    kept["digests"] = dict.fromkeys(kept["digests"], OTHER)
    path.write_text(json.dumps(kept))


def test_a_second_start_takes_the_digests_from_the_cache(folder: Path, tmp_path: Path) -> None:
    hashed = digest(folder, a_cache(tmp_path))
    assert digest(folder, a_cache(tmp_path)) == hashed

    falsify(tmp_path)

    assert digest(folder, a_cache(tmp_path)) != hashed


def test_an_edit_that_keeps_size_and_mtime_changes_the_digest(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    before, facts = digest(folder, a_cache(tmp_path)), path.stat()

    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) - 60)
        file.write(bytes([content[-60] ^ 1]))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))

    assert path.stat().st_size == facts.st_size
    assert digest(folder, a_cache(tmp_path)) != before


def test_a_replaced_file_has_a_new_digest(folder: Path, tmp_path: Path) -> None:
    before = digest(folder, a_cache(tmp_path))

    save_weights(folder, last=3.0)

    assert digest(folder, a_cache(tmp_path)) != before


@pytest.mark.parametrize(
    "cache", [{"age_s": 0.0}, {"min_bytes": 1 << 20}], ids=["too young", "too small"]
)
def test_recent_and_small_files_are_hashed_at_each_start(
    folder: Path, tmp_path: Path, cache: dict[str, float]
) -> None:
    digest(folder, a_cache(tmp_path, **cache))  # type: ignore[arg-type]

    assert not kept_files(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"identity": 1}',
        b"\xff",
        b"[" * 100_000,
        b'{"identity": null, "digests": []}',
    ],
)
def test_a_damaged_digest_cache_is_rewritten(folder: Path, tmp_path: Path, content: bytes) -> None:
    hashed = digest(folder, a_cache(tmp_path))
    [path] = kept_files(tmp_path)
    whole = path.read_bytes()

    path.write_bytes(content)

    assert digest(folder, a_cache(tmp_path)) == hashed
    assert path.read_bytes() == whole
    assert kept_files(tmp_path) == [path]


def test_malformed_digests_are_not_used(folder: Path, tmp_path: Path) -> None:
    hashed = digest(folder, a_cache(tmp_path))
    [path] = kept_files(tmp_path)

    path.write_text(path.read_text().replace(json.loads(path.read_text())["digests"]["scale"], ""))

    assert digest(folder, a_cache(tmp_path)) == hashed


def test_without_a_writable_cache_folder_weights_are_hashed(folder: Path) -> None:
    without = digest(folder, DigestCache(None))

    assert digest(folder, DigestCache(Path(os.devnull) / "cache", min_bytes=0)) == without
