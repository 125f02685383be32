"""Imports between product modules: their cycles, and those against the order of the layers.

The layers are those of the import-linter contract in pyproject.toml. A module that no layer names,
such as `baton.encoding`, has the lowest layer of its package, since any other module may import it;
a `__main__` has the highest. Imports inside functions and under TYPE_CHECKING count. Imports of
generated stubs count only for the order of packages.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.product_code import FUNCTIONS, Module

GENERATED = ("_pb2", "_pb2_grpc")
# Libraries that take long to import. A function may import a module of ours for their sake.
HEAVY = {
    "asyncio", "grpc", "google", "httpx", "llguidance", "matplotlib", "nixl", "numpy",
    "opentelemetry", "pydantic", "pydantic_core", "prometheus_client", "rich", "smg_grpc_proto",
    "starlette", "tokenizers", "torch", "transformers", "triton", "ucxx", "uvicorn", "websockets",
    "zmq",
}  # fmt: skip


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    is_local: bool = False  # inside a function
    is_generated: bool = False  # a stub
    is_for_typing: bool = False  # below TYPE_CHECKING

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} -> {self.imported}"


class Layers:
    """Order of the layers, topmost first. Layers that are siblings have one position."""

    def __init__(self, layers: Sequence[str]) -> None:
        self._positions = {
            name.strip(): position
            for position, layer in enumerate(layers)
            for name in layer.split("|")
        }

    def position(self, module: str) -> int:
        parts = module.split(".")
        for length in range(len(parts), 0, -1):
            position = self._positions.get(".".join(parts[:length]))
            if position is not None:
                return position
        package = self.package(module)
        of_package = self._positions_of(package)
        # A package that others are parts of, such as `baton`, exports what is in all of them.
        is_top = parts[-1] == "__main__" or module == package
        return min(of_package) if is_top else max(of_package)

    def package(self, module: str) -> str:
        """Return a module's room, such as `baton.router`, else its top-level package."""
        first, *others = module.split(".")
        room = ".".join((first, *others[:1]))
        return room if room in self._positions else first

    def package_position(self, module: str) -> int:
        """Return the highest layer of a module's package."""
        return min(self._positions_of(self.package(module)))

    def _positions_of(self, package: str) -> list[int]:
        return [
            at
            for name, at in self._positions.items()
            if name == package or name.startswith(f"{package}.")
        ]


def read_layers(pyproject: Path) -> Layers:
    with pyproject.open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return Layers(next(each["layers"] for each in contracts if each["type"] == "layers"))


def imports_of(modules: Sequence[Module]) -> list[Import]:
    """List the imports of product modules by product modules."""
    names = {module.name for module in modules}
    return [each for module in modules for each in _imports(module, names)]


def upward_imports(imports: Sequence[Import], layers: Layers) -> list[Import]:
    """List the imports of modules in a higher layer than the importer's."""
    return [
        each
        for each in imports
        if not each.is_generated
        if layers.position(each.imported) < layers.position(each.importer)
    ]


def upward_packages(
    imports: Sequence[Import], layers: Layers, *, with_generated: bool = False
) -> list[str]:
    """List the pairs of packages of which the lower one imports the higher one."""
    pairs = {
        f"{layers.package(each.importer)} -> {layers.package(each.imported)}"
        for each in imports
        if with_generated or not each.is_generated
        if layers.package_position(each.imported) < layers.package_position(each.importer)
    }
    return sorted(pairs)


def imports_that_avoid_cycles(imports: Sequence[Import]) -> list[Import]:
    """List the imports inside functions that would close a cycle at module level."""
    graph = _module_level_graph(imports)
    return [
        each
        for each in imports
        if each.is_local and each.importer in _closure(graph, each.imported)
    ]


def needless_local_imports(imports: Sequence[Import], modules: Sequence[Module]) -> list[Import]:
    """List the imports inside functions that could be at module level: legal and cheap.

    They close no cycle, bring in no heavy library that their module does not import anyway, and no
    comment gives another reason, at the import or above its block.
    """
    graph = _module_level_graph(imports)
    heavy = {module.name: set(_heavy_libraries(module)) for module in modules}

    def cost(module: str) -> set[str]:
        return set().union(*(heavy[name] for name in _closure(graph, module)))

    avoid_cycles = set(imports_that_avoid_cycles(imports))
    explained = {(module.name, line) for module in modules for line in _explained_imports(module)}
    return [
        each
        for each in imports
        if each.is_local and each not in avoid_cycles
        if (each.importer, each.line) not in explained
        if cost(each.imported) <= cost(each.importer)
    ]


def import_graph(imports: Sequence[Import], modules: Sequence[Module]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for each in imports:
        if not each.is_generated:
            graph[each.importer].add(each.imported)
    return graph


def import_cycles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Find the groups of modules that import each other (Tarjan's algorithm)."""
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


def _imports(module: Module, names: set[str]) -> Iterator[Import]:
    functions = (one for one in ast.walk(module.tree) if isinstance(one, FUNCTIONS))
    local = _nodes_below(functions)
    for_typing = _nodes_below(
        one
        for one in ast.walk(module.tree)
        if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
    )
    for node in ast.walk(module.tree):
        for name, is_generated in _imported_names(node, names):
            if name != module.name:
                line = getattr(node, "lineno", 0)
                yield Import(
                    module.name,
                    name,
                    line,
                    is_local=id(node) in local,
                    is_generated=is_generated,
                    is_for_typing=id(node) in for_typing,
                )


def _nodes_below(tops: Iterable[ast.AST]) -> set[int]:
    return {id(node) for top in tops for node in ast.walk(top)}


def _imported_names(node: ast.AST, names: set[str]) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names if alias.name in names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            found = next((name for name in (full, node.module) if name in names), None)
            if found is not None:
                yield found, alias.name.endswith(GENERATED)


def _explained_imports(module: Module) -> Iterator[int]:
    """Yield the lines of imports with a comment, or below one."""
    previous_end, is_explained = 0, False
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            if node.lineno != previous_end + 1:  # the first of its block
                is_explained = node.lineno - 1 in module.commented_lines
            if is_explained or node.lineno in module.commented_lines:
                yield node.lineno
            previous_end = node.end_lineno or node.lineno


def _heavy_libraries(module: Module) -> Iterator[str]:
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            yield from (HEAVY & {alias.name.split(".")[0] for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from HEAVY & {node.module.split(".")[0]}
            if any(alias.name.endswith(GENERATED) for alias in node.names):
                yield from ("google", "grpc")


def _module_level_graph(imports: Sequence[Import]) -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for each in imports:
        if not (each.is_local or each.is_for_typing):
            graph.setdefault(each.importer, set()).add(each.imported)
    return graph


def _closure(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen, pending = {start}, [start]
    while pending:
        new = graph.get(pending.pop(), set()) - seen
        seen |= new
        pending += new
    return seen
