"""Rooms that are taken out of the product: their folder, and the entries of tables that name them.

An entry is an element of a list, tuple, set or dict, a keyword argument, a field of a class, or a
definition that only entries of its own module use. Where anything else names the room, it cannot be
taken out.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tools.product_code import Module

MAX_FILES, MAX_ENTRIES = 3, 8  # that go with a room
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VARIABLES = (ast.Assign, ast.AnnAssign)


@dataclass(slots=True)
class Removal:
    """Parts of other modules that go with a room, and what holds the room in its place."""

    parts: dict[Path, list[ast.AST]] = field(default_factory=dict)
    held_by: list[str] = field(default_factory=list)


def remove_room(modules: Sequence[Module], room: str) -> Removal:
    """Find what goes with a folder, or with a module if `room` ends in `.py`."""
    inside = {each.name for each in modules if each.path.is_relative_to(room)}
    assert inside, f"there is no room {room}"
    removal, definitions = Removal(), set[str]()
    outside = [each for each in modules if each.name not in inside]
    for module in outside:
        if any(_bound_by(module, inside)):
            definitions |= {
                f"{module.name}.{name}" for name in _remove_from(module, inside, removal)
            }
    for module in outside:
        for _, name in _bound_by(module, definitions):
            removal.held_by.append(f"{module.path} imports {name}")
    if len(removal.parts) > MAX_FILES:
        removal.held_by.append(f"{len(removal.parts)} files name it")
    return removal


def source_without(module: Module, parts: Collection[ast.AST]) -> str:
    """Return the source of a module without some of its parts."""
    return ast.unparse(_Remover(parts).visit(module.tree))


def _remove_from(module: Module, room: Collection[str], removal: Removal) -> list[str]:
    """Remove the entries of a room, and return the definitions that go with them."""
    parents = {
        child: node for node in ast.walk(module.tree) for child in ast.iter_child_nodes(node)
    }
    bound = [*_bound_by(module, room)]
    parts: list[ast.AST] = [alias for alias, _ in bound]
    names, definitions, num_entries = [name for _, name in bound], list[str](), 0
    for name in names:  # grows
        for use in _uses(module.tree, name):
            around = [*_around(use, parents)]
            if any(each in parts for each in around):
                continue
            entry = _entry(around)
            if entry is None:
                removal.held_by.append(f"{module.path}:{use.lineno} uses {name}")
                continue
            parts.append(entry)
            num_entries += 1
            if not _is_field(entry, parents[entry]):
                definitions += _defined_by(entry)
                names += _defined_by(entry)
    if num_entries > MAX_ENTRIES:
        removal.held_by.append(f"{module.path} has {num_entries} entries")
    removal.parts[module.path] = parts
    return definitions


def _bound_by(module: Module, imported: Collection[str]) -> Iterator[tuple[ast.alias, str]]:
    """Yield what imports bind to these modules, or to definitions of them."""
    packages = {name.removesuffix(".__init__") for name in imported}
    for alias, package, full_name in _imports(module):
        if package in packages or full_name in packages:
            yield alias, alias.asname or alias.name


@cache
def _imports(module: Module) -> Sequence[tuple[ast.alias, str | None, str]]:
    """Return each import, with its package and its full name."""
    return [
        (alias, package, f"{package}.{alias.name}" if package else alias.name)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for package in [node.module if isinstance(node, ast.ImportFrom) else None]
        for alias in node.names
    ]


def _uses(tree: ast.Module, name: str) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node


def _around(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """Yield a part of a module, and all parts around it."""
    yield node
    while node in parents:
        node = parents[node]
        yield node


def _entry(around: Sequence[ast.AST]) -> ast.AST | None:
    """Return the smallest entry of a table around a use, or the definition of the module."""
    for node, parent in pairwise(around):
        if isinstance(parent, ast.List | ast.Tuple | ast.Set | ast.Dict):
            return node
        if isinstance(node, ast.keyword) or _is_field(node, parent):
            return node
        if isinstance(parent, ast.Module):
            return node if _defined_by(node) else None
    return None


def _is_field(node: ast.AST, parent: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(parent, ast.ClassDef)


def _defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if not isinstance(node, VARIABLES):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


class _Remover(ast.NodeTransformer):
    def __init__(self, parts: Collection[ast.AST]) -> None:
        self._parts = {id(part) for part in parts}

    def visit(self, node: ast.AST) -> Any:
        return None if id(node) in self._parts else super().visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        items = [
            (key, value)
            for key, value in zip(node.keys, node.values, strict=True)
            if not {id(key), id(value)} & self._parts
        ]
        node.keys, node.values = [key for key, _ in items], [value for _, value in items]
        self.generic_visit(node)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        self.generic_visit(node)
        return node if node.names else None

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        self.generic_visit(node)
        return node if node.names else None
