"""Product modules of a checkout, parsed."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = "benchmarks/"
PACKAGE = "baton"  # has a link to each room at the top level
NOT_PRODUCT = ("tests/", "tools/", "protos/", "deploy/", "setup.py", BENCHMARKS)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Module:
    path: Path
    num_lines: int
    tree: ast.Module
    package: str = ""  # that the module's folder is imported from, if it is not a package itself

    @property
    def name(self) -> str:
        parts = (*self.package.split(), *self.path.with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")


def parse_module(path: Path, source: str, package: str = "") -> Module:
    return Module(path, source.count("\n"), ast.parse(source), package)


def product_modules(root: Path) -> list[Module]:
    """Parse every tracked Python file that the wheel ships."""
    return [each for each in _tracked_modules(root) if not str(each.path).startswith(NOT_PRODUCT)]


def benchmark_modules(root: Path) -> list[Module]:
    return [each for each in _tracked_modules(root) if str(each.path).startswith(BENCHMARKS)]


def _tracked_modules(root: Path) -> Iterator[Module]:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in listed:
        path = Path(name)
        is_room = (root / PACKAGE / path.parts[0]).is_symlink()
        source = (root / name).read_text(encoding="utf-8")
        yield parse_module(path, source, PACKAGE if is_room else "")
