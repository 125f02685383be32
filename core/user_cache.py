"""Folder of this user for what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache_folder() -> Path | None:
    """Return Baton's folder in the user's cache. A user without a home has none."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # By the XDG specification, relative paths are ignored.
        return (named if named.is_absolute() else Path.home() / ".cache") / "baton"
    except RuntimeError:
        return None
