"""Product modules of a checkout, parsed."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Sequence
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
    commented_lines: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        parts = (*self.package.split(), *self.path.with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")


def parse_module(path: Path, source: str, package: str = "") -> Module:
    commented = (at for at, line in enumerate(source.split("\n"), 1) if re.search("(^| )# ", line))
    return Module(path, source.count("\n"), ast.parse(source), package, frozenset(commented))


def product_modules(root: Path) -> list[Module]:
    """Parse every tracked Python file that the wheel ships."""
    return _parse_all(root, [each for each in _tracked(root) if not each.startswith(NOT_PRODUCT)])


def benchmark_modules(root: Path) -> list[Module]:
    return _parse_all(root, [each for each in _tracked(root) if each.startswith(BENCHMARKS)])


def _tracked(root: Path) -> list[str]:
    return subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()


def _parse_all(root: Path, names: Sequence[str]) -> list[Module]:
    modules = []
    for name in names:
        path = Path(name)
        is_room = (root / PACKAGE / path.parts[0]).is_symlink()
        source = (root / name).read_text(encoding="utf-8")
        modules.append(parse_module(path, source, PACKAGE if is_room else ""))
    return modules
