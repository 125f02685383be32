"""Import directions, measured on made-up modules."""

from __future__ import annotations

from pathlib import Path

from tools.import_layers import (
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
from tools.product_code import Module, parse_module

LAYERS = Layers(["app.cli", "router | node", "app.client", "rpc", "engine"])


def modules_of(**sources: str) -> list[Module]:
    """Build modules; `__` in a name stands for a dot, `_init` for the package itself."""
    return [
        parse_module(Path(name.replace("__", "/") + ".py"), source)
        for name, source in sources.items()
    ]


def test_the_order_is_read_from_the_contract(tmp_path: Path) -> None:
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[[tool.importlinter.contracts]]\ntype = "independence"\nmodules = ["a"]\n'
        '[[tool.importlinter.contracts]]\ntype = "layers"\nlayers = ["app", "router | node"]\n'
    )

    layers = read_layers(pyproject)

    assert [layers.position(name) for name in ("app.cli", "router.x", "node")] == [0, 1, 1]


def test_an_import_of_a_higher_layer_inside_a_function_is_detected() -> None:
    modules = modules_of(
        rpc__server="import router.pipeline\n",
        engine__core="def run():\n    from rpc.server import serve\n",
        router__pipeline="from engine import core\n",
    )

    found = upward_imports(imports_of(modules), LAYERS)

    assert sorted(map(str, found)) == [
        "engine.core:2 -> rpc.server",
        "rpc.server:1 -> router.pipeline",
    ]


def test_a_module_without_a_layer_is_in_the_lowest_of_its_package() -> None:
    modules = modules_of(
        app__units="", router__pipeline="import app.units\n", engine__core="import app.units\n"
    )

    imports = imports_of(modules)

    assert [each.importer for each in upward_imports(imports, LAYERS)] == ["engine.core"]
    assert upward_packages(imports, LAYERS) == ["engine -> app", "router -> app"]


def test_stubs_are_counted_only_on_request() -> None:
    modules = modules_of(app__v1="", rpc__server="from app.v1 import node_pb2\n")

    imports = imports_of(modules)

    assert upward_imports(imports, LAYERS) == []
    assert upward_packages(imports, LAYERS) == []
    assert upward_packages(imports, LAYERS, with_generated=True) == ["rpc -> app"]


def test_a_local_import_with_a_comment_is_not_needless() -> None:
    modules = modules_of(
        engine__a=(
            "def f():\n    import engine.b  # rarely used\n\n"
            "def g():\n    # Rarely used.\n    import engine.b\n    import engine.c\n\n"
            "def h():\n    import engine.c\n"
        ),
        engine__b="",
        engine__c="",
    )

    found = needless_local_imports(imports_of(modules), modules)

    assert list(map(str, found)) == ["engine.a:10 -> engine.c"]


def test_local_imports_that_avoid_neither_a_cycle_nor_a_library_are_found() -> None:
    modules = modules_of(
        engine__a="import engine.b\n",
        engine__b="def f():\n    import engine.a\n    import engine.c\n    import engine.d\n",
        engine__c="import torch\n",
        engine__d="",
    )

    imports = imports_of(modules)

    assert [each.imported for each in imports_that_avoid_cycles(imports)] == ["engine.a"]
    assert [each.imported for each in needless_local_imports(imports, modules)] == ["engine.d"]
    assert import_cycles(import_graph(imports, modules)) == [["engine.a", "engine.b"]]
