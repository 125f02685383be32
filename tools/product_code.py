"""Product modules of a checkout, parsed."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = "benchmarks/"
NOT_PRODUCT = ("tests/", "tools/", "protos/", "deploy/", "setup.py", BENCHMARKS)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Module:
    path: Path
    num_lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


def parse_module(path: Path, source: str) -> Module:
    return Module(path, source.count("\n"), ast.parse(source))


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
        yield parse_module(Path(name), (root / name).read_text(encoding="utf-8"))
