"""Rooms at the rim of the product can be taken out: a folder, and its entries in tables."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.rooms import remove_room, source_without
from tools.product_code import Module, product_modules

ROOT = Path(__file__).parents[2]
ROOMS = (
    "router/doors/messages",
    "router/doors/responses",
    "router/doors/smg",
    "engine/runner/triton",
    "engine/runner/encoders",
    "engine/runner/transformers_models",
    "engine/runner/ranks",
    "engine/media",
    "engine/runner/vision",
    "engine/runner/draft_heads",
    "router/documents",
    "router/pictures/families",
    "router/dispatch/vllm",
    "checkpoint/gguf",
    "kv_transfer/tiers/stores/objects",
    "node/kv/events",
    "node/kv/foreign",
)
# That other modules use outside of tables.
NO_ROOMS_YET = (
    "router/pictures",
    "engine/runner/adapters",
)
MAX_S = 1800  # of a type check without a cache


@cache
def modules() -> Sequence[Module]:
    return product_modules(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS)
def test_nothing_but_entries_of_tables_names_a_room(room: str) -> None:
    assert remove_room(modules(), room).held_by == []


@pytest.mark.slow
@pytest.mark.parametrize("folder", NO_ROOMS_YET)
def test_a_folder_that_has_become_a_room_is_listed_as_one(folder: str) -> None:
    assert remove_room(modules(), folder).held_by


@pytest.mark.slow
@pytest.mark.timeout(MAX_S)
def test_the_others_pass_the_type_check_without_the_rooms(tmp_path: Path) -> None:
    """Import rules hold as well, since imports are removed only."""
    for name in ("baton", *(each.name for each in (ROOT / "baton").iterdir() if each.is_symlink())):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    parsed = product_modules(ROOT)  # and changed below
    by_path = {each.path: each for each in parsed}
    parts = [item for room in ROOMS for item in remove_room(parsed, room).parts.items()]
    for path in {path for path, _ in parts}:
        goes = [part for each, found in parts if each == path for part in found]
        (tmp_path / path).write_text(source_without(by_path[path], goes))
    for room in ROOMS:
        shutil.rmtree(tmp_path / room)
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", tmp_path / ".mypy_cache")

    check = subprocess.run(
        [sys.executable, "-m", "mypy", "baton"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert check.returncode == 0, check.stdout
