"""Code of the examples in docs/, as installed packages."""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODE = re.compile(r"```python\n# (\w+)\.py\n(.*?)```", re.DOTALL)


def write_example(page: str, folder: Path) -> str:
    """Write the module that a page of docs/ shows. Returns its name."""
    [(name, code)] = CODE.findall((DOCS / page).read_text(encoding="utf-8"))
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return str(name)


def write_package(folder: Path, group: str, entry_points: dict[str, str]) -> None:
    """Write the metadata of an installed package with these entry points."""
    about = folder / "example-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: example\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entry_points.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def installed_at(folder: Path) -> dict[str, str]:
    """Return the environment of a process in which this folder's packages are installed."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}
