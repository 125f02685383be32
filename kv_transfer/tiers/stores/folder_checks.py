"""Owners and modes of a KV folder: no other user may read or replace KV in it."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from baton.core.errors import InvalidConfig

FOLDER_MODE = 0o700  # prompts can be recovered from their KV
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_folder(folder: str) -> None:
    """Make the folder for the files of all models. Raises InvalidConfig if others can replace it.

    One that does not work is no error: a node starts without it, and uses it once it works.
    """
    path = Path(folder).expanduser()
    with suppress(OSError):
        make_private(path)
        check_folder_owner(path)


def make_private(folder: Path) -> None:
    if not folder.exists():
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)


def check_folder_owner(folder: Path) -> None:
    """Raise InvalidConfig if other users can replace the KV folder, or folders in it."""
    whole = folder.resolve()
    for path in (whole, *whole.parents):
        is_exposed = path == whole or bool(path.parent.stat().st_mode & stat.S_IWOTH)
        if is_exposed and path.stat().st_uid not in (0, os.geteuid()):
            raise InvalidConfig(f"--kv-folder {folder}: {path} {_of_another(path)}")
    mode = whole.stat().st_mode
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        raise InvalidConfig(
            f"--kv-folder {folder}: other users may write to it; chmod go-w, or name a new folder "
            "in it"
        )


def check_blocks_owner(folder: Path, blocks: Path) -> None:
    """Raise InvalidConfig if other users can change the blocks of a KV folder."""
    facts = blocks.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & _OTHERS_WRITE:
        raise InvalidConfig(f"--kv-folder {folder}: {blocks} {_of_another(blocks)}")


def _of_another(path: Path) -> str:
    return f"belongs to, or may be changed by, user {path.stat().st_uid}: name a folder of your own"
