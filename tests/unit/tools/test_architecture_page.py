"""Paths on the architecture pages and in CONTRIBUTING: each exists."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*(ROOT / "docs").glob("architecture*.md"), ROOT / "CONTRIBUTING.md"]
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
# A path of at least one folder, or the name of a Python file. URLs begin with a slash.
PATH = re.compile(r"(?<![\w/:.])((?:[a-z_0-9]+/)+[\w.*]*|[a-z_0-9]+\.py)")


def test_every_path_on_the_architecture_pages_exists() -> None:
    known = _tracked_paths()
    text = "\n".join(page.read_text() for page in PAGES)
    named = {path for code in CODE.findall(text) for path in PATH.findall(code)}

    assert len(named) > 100
    assert sorted(path for path in named if not _is_known(path, known)) == []


def test_a_stale_path_is_detected() -> None:
    known = _tracked_paths()

    assert not _is_known("engine/runner/batch.py", known)
    assert not _is_known("kv_seam.py", known)


def _is_known(path: str, known: set[str]) -> bool:
    """Accept paths from the root or from a folder that the text names, with or without `.py`."""
    wanted = "/" + path.strip("/")
    if "*" in path:
        return bool(fnmatch.filter(known, f"*{wanted}"))
    return any(each.endswith((wanted, f"{wanted}.py")) for each in known)


def _tracked_paths() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    folders = {str(parent) for path in listed for parent in Path(path).parents}
    return {f"/{path}" for path in (*listed, *folders)}
