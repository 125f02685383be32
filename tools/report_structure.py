"""Report figures about the structure of the product code: sizes, docstrings, imports, shapes.

`python -m tools.report_structure` measures the checkout that it is run in, or the one that
`--checkout` names; `--json` prints the figures for programs, `--list` adds what was counted.
"""

from __future__ import annotations

import argparse
import ast
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tools.import_layers import (
    Import,
    Layers,
    import_cycles,
    import_graph,
    imports_of,
    imports_that_avoid_cycles,
    needless_local_imports,
    read_layers,
    upward_imports,
    upward_packages,
)
from tools.product_code import FUNCTIONS, Module, benchmark_modules, product_modules
from tools.request_shapes import NOT_SHAPES, Shape, class_shapes, message_shapes, read_protos

QUESTION_WORDS = {"What", "Who", "Whose", "Whom", "Which", "How", "Whether", "Where", "When", "Why"}
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)


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
    upward_imports: int
    upward_packages: int
    upward_packages_with_stubs: int
    local_imports: int
    local_imports_that_avoid_a_cycle: int
    needless_local_imports: int
    request_shapes: int
    request_wrappers: int
    request_messages: int
    output_shapes: int
    output_wrappers: int
    output_messages: int
    benchmark_files: int  # not shipped
    benchmark_lines: int


@dataclass(frozen=True, slots=True)
class Findings:
    """The items behind the figures."""

    repeated_class_names: list[str]
    import_cycles: list[list[str]]
    upward_imports: list[Import]
    upward_packages: list[str]
    upward_packages_with_stubs: list[str]
    local_imports: list[Import]
    local_imports_that_avoid_a_cycle: list[Import]
    needless_local_imports: list[Import]
    request_shapes: list[Shape]
    request_wrappers: list[Shape]
    request_messages: list[Shape]
    output_shapes: list[Shape]
    output_wrappers: list[Shape]
    output_messages: list[Shape]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--checkout", type=Path, default=Path.cwd())
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", action="store_true", help="list what was counted")
    options = parser.parse_args()
    sys.setrecursionlimit(10_000)  # the cycle search visits modules recursively
    modules = product_modules(options.checkout)
    layers = read_layers(options.checkout / "pyproject.toml")
    findings = find(modules, layers, read_protos(options.checkout))
    figures = asdict(figures_of(modules, findings, benchmark_modules(options.checkout)))
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):45} {value}")
    if options.list:
        _print_list(modules, findings)


def find(modules: Sequence[Module], layers: Layers, protos: Mapping[str, str]) -> Findings:
    imports = imports_of(modules)
    requests, outputs = class_shapes(modules)
    request_messages, output_messages = message_shapes(protos)
    return Findings(
        repeated_class_names=repeated_class_names(modules),
        import_cycles=import_cycles(import_graph(imports, modules)),
        upward_imports=upward_imports(imports, layers),
        upward_packages=upward_packages(imports, layers),
        upward_packages_with_stubs=upward_packages(imports, layers, with_generated=True),
        local_imports=[each for each in imports if each.is_local and not each.is_generated],
        local_imports_that_avoid_a_cycle=imports_that_avoid_cycles(imports),
        needless_local_imports=needless_local_imports(imports, modules),
        request_shapes=requests.carriers,
        request_wrappers=requests.wrappers,
        request_messages=request_messages.carriers,
        output_shapes=outputs.carriers,
        output_wrappers=outputs.wrappers,
        output_messages=output_messages.carriers,
    )


def figures_of(
    modules: Sequence[Module], findings: Findings, benchmarks: Sequence[Module]
) -> Figures:
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
        class_names_used_twice=len(findings.repeated_class_names),
        import_cycles=len(findings.import_cycles),
        upward_imports=len(findings.upward_imports),
        upward_packages=len(findings.upward_packages),
        upward_packages_with_stubs=len(findings.upward_packages_with_stubs),
        local_imports=len(findings.local_imports),
        local_imports_that_avoid_a_cycle=len(findings.local_imports_that_avoid_a_cycle),
        needless_local_imports=len(findings.needless_local_imports),
        request_shapes=len(findings.request_shapes),
        request_wrappers=len(findings.request_wrappers),
        request_messages=len(findings.request_messages),
        output_shapes=len(findings.output_shapes),
        output_wrappers=len(findings.output_wrappers),
        output_messages=len(findings.output_messages),
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


def _print_list(modules: Sequence[Module], findings: Findings) -> None:
    print("\nDocstrings that open with a question word:", *question_docstrings(modules), sep="\n  ")
    for field in fields(findings):
        items = getattr(findings, field.name)
        print(f"\n{field.name.replace('_', ' ').capitalize()}:", *items, sep="\n  ")
    excluded = [f"{', '.join(sorted(names))}: {why}" for why, names in NOT_SHAPES.items()]
    print("\nNot counted as shapes:", *excluded, sep="\n  ")


if __name__ == "__main__":
    main()
