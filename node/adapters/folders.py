"""Folders of adapters that a node may read."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS
from baton.core.errors import InvalidRequest

MAX_PATH_CHARACTERS = 512


def folder_below(root: Path | None, path: str) -> Path:
    """Return the folder of a path relative to `root`.

    Raises InvalidRequest for a path that leads elsewhere, also by symbolic links of its files.
    """
    if root is None:
        raise InvalidRequest("this node loads no adapters: start it with --lora-root", "path")
    check_path(path)
    real_root, folder = root.resolve(), root / path
    for file in (folder / CONFIG, folder / WEIGHTS):
        try:
            real = file.resolve()
            is_below, is_file = real.is_relative_to(real_root), real.is_file()
        except (OSError, RuntimeError) as error:  # RuntimeError: links that form a loop
            raise InvalidRequest(f"path {path!r} cannot be read: {error}", "path") from error
        if not is_below:
            raise InvalidRequest(
                f"path {path!r}: a symbolic link leads out of the node's --lora-root", "path"
            )
        if not is_file:
            raise InvalidRequest(f"path {path!r}: there is no file {file.name} in it", "path")
    return folder


def check_path(path: str) -> None:
    """Raise InvalidRequest unless the path has the form of one below a node's root."""
    if len(path) > MAX_PATH_CHARACTERS or not path.isprintable():
        raise InvalidRequest(
            f"path must have at most {MAX_PATH_CHARACTERS} printable characters", "path"
        )
    parts = PurePosixPath(path)
    if not parts.parts or parts.is_absolute() or ".." in parts.parts:
        raise InvalidRequest(
            f"path {path!r}: it must be relative to the node's --lora-root, without '..'", "path"
        )


def path_below(root: Path | None, folder: Path) -> str:
    """Return the path of a folder relative to `root`; empty if it is elsewhere."""
    if root is None:
        return ""
    real, real_root = folder.resolve(), root.resolve()
    is_below = real.is_relative_to(real_root) and real != real_root
    return real.relative_to(real_root).as_posix() if is_below else ""
