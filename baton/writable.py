"""Tries whether a file or a folder can be written before the work whose outcome goes there."""

from __future__ import annotations

import tempfile
from pathlib import Path


def file_trouble(path: Path) -> str | None:
    """Why the file cannot be written; None if it can. What is no plain file is left alone."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file"
        folder = path.absolute().parent
        if not folder.is_dir():
            return f"there is no folder {folder}; make it first"
        if path.exists() and not path.is_file():
            return None  # a pipe or a device
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return f"{path} cannot be written to: {error.strerror}; name another file"
    return None


def folder_trouble(folder: Path) -> str | None:
    """The same for a folder, which may have to be made with those above it."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            return f"{there} is no folder; name another"
        with tempfile.TemporaryDirectory(dir=there):
            return None
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}; name another folder"
