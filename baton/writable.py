"""Checks that an output file or folder is writable, made before the work starts."""

from __future__ import annotations

import tempfile
from pathlib import Path


def file_error(path: Path) -> str | None:
    """Return why the file cannot be written, or None. Pipes and devices are not checked."""
    try:
        if path.is_dir():
            return f"{path} is a folder; name a file"
        folder = path.absolute().parent
        if not folder.is_dir():
            return f"there is no folder {folder}; create it first"
        if path.exists() and not path.is_file():
            return None  # a pipe or a device
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        return f"{path} cannot be written to: {error.strerror}; name another file"
    return None


def folder_error(folder: Path) -> str | None:
    """Return why the folder cannot be created or written to, or None."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            return f"{existing} is not a folder; name another"
        with tempfile.TemporaryDirectory(dir=existing):
            return None
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}; name another folder"
