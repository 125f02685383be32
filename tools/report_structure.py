"""Report figures about the structure of the product code: sizes, docstrings, names, import cycles.

`python -m tools.report_structure` measures the checkout that it is run in; `--json` prints the
figures for programs, `--list` adds the docstrings, class names and cycles that were counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

BENCHMARKS = "benchmarks/"
NOT_PRODUCT = ("tests/", "tools/", "protos/", "deploy/", "setup.py", BENCHMARKS)
QUESTION_WORDS = {"What", "Who", "Whose", "Whom", "Which", "How", "Whether", "Where", "When", "Why"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


@dataclass(frozen=True, slots=True)
class Module:
    path: Path
    num_lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True)
class Figures:
    files: int
    lines: int
    largest_folder: str
    files_in_largest_folder: int
    functions: int
    function_lines_median: float
    function_lines_p90: int
    function_lines_max: int
    docstrings: int
    docstrings_that_open_with_a_question_word: int
    class_names_used_twice: int
    import_cycles: int
    benchmark_files: int  # not shipped
    benchmark_lines: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="list what was counted")
    options = parser.parse_args()
    tracked = tracked_modules(Path.cwd())
    modules = [one for one in tracked if not str(one.path).startswith(NOT_PRODUCT)]
    benchmarks = [one for one in tracked if str(one.path).startswith(BENCHMARKS)]
    figures = asdict(figures_of(modules, benchmarks))
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):45} {value}")
    if options.list:
        _print_list(modules)


def tracked_modules(root: Path) -> list[Module]:
    """Parse every tracked Python file."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split()
    sources = {name: (root / name).read_text(encoding="utf-8") for name in listed}
    return [
        Module(Path(name), source.count("\n"), ast.parse(source))
        for name, source in sources.items()
    ]


def figures_of(modules: Sequence[Module], benchmarks: Sequence[Module]) -> Figures:
    """Measure the product modules, which the wheel ships, and count the benchmarks."""
    lengths = sorted(function_lengths(modules))
    folders = Counter(str(module.path.parent) for module in modules)
    folder, num_files = folders.most_common(1)[0]
    return Figures(
        files=len(modules),
        lines=sum(module.num_lines for module in modules),
        largest_folder=folder,
        files_in_largest_folder=num_files,
        functions=len(lengths),
        function_lines_median=statistics.median(lengths),
        function_lines_p90=lengths[len(lengths) * 9 // 10],
        function_lines_max=lengths[-1],
        docstrings=len(list(docstrings(modules))),
        docstrings_that_open_with_a_question_word=len(list(question_docstrings(modules))),
        class_names_used_twice=len(repeated_class_names(modules)),
        import_cycles=len(import_cycles(imports_by_module(modules))),
        benchmark_files=len(benchmarks),
        benchmark_lines=sum(module.num_lines for module in benchmarks),
    )


def function_lengths(modules: Sequence[Module]) -> Iterator[int]:
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, FUNCTIONS):
                yield (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings(modules: Sequence[Module]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring."""
    for module in modules:
        for node in ast.walk(module.tree):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield f"{module.path}:{getattr(node, 'lineno', 1)}", text


def question_docstrings(modules: Sequence[Module]) -> Iterator[str]:
    for place, text in docstrings(modules):
        if text.split()[0].rstrip(",:") in QUESTION_WORDS:
            yield f"{place}: {text.splitlines()[0]}"


def repeated_class_names(modules: Sequence[Module]) -> list[str]:
    classes = Counter(
        node.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    return sorted(name for name, count in classes.items() if count > 1)


def imports_by_module(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Map each module to the product modules that it imports, inside functions too."""
    names = {module.name for module in modules}
    return {module.name: set(_imports(module, names)) - {module.name} for module in modules}


def _imports(module: Module, names: set[str]) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield from [name for name in (full, node.module) if name in names][:1]


def import_cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Find the groups of modules that import each other (Tarjan's algorithm)."""
    sys.setrecursionlimit(10_000)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for name in imports:
        if name not in index:
            visit(name)
    return found


def _print_list(modules: Sequence[Module]) -> None:
    print("\nDocstrings that open with a question word:", *question_docstrings(modules), sep="\n  ")
    print("\nClass names used twice:", *repeated_class_names(modules), sep="\n  ")
    print("\nImport cycles:", *import_cycles(imports_by_module(modules)), sep="\n  ")


if __name__ == "__main__":
    main()
