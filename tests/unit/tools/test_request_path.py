"""The measurement of a request's path, on made-up calls and functions."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

from tools.path_recorder.sitecustomize import Recorder, role_of
from tools.product_code import parse_module
from tools.request_path import Place, figures_of, request_path

SOURCE = """
@decorated
def outer():
    def inner():
        return 1
    return inner()

class Queue:
    def take(self): return 2
"""
OUTER, INNER = Place("router/a.py", "outer", 2), Place("router/a.py", "outer.<locals>.inner", 4)


def test_calls_equally_frequent_when_idle_are_background_work() -> None:
    beat, step = Place("a.py", "beat", 1), Place("a.py", "step", 5)

    assert request_path({step: 3, beat: 1}, [{beat: 1}, {step: 2}]) == [step]


def test_whole_files_and_lines_of_functions_are_counted_once() -> None:
    sources = {"router/a.py": parse_module(Path("router/a.py"), SOURCE)}
    generated = Place("router/a.py", "__create_fn__.<locals>.__init__", 0)
    stub = Place("baton/v1/node_pb2.py", "f", 1)

    figures = figures_of([OUTER, INNER, OUTER, generated, stub], sources)

    assert (figures.files, figures.file_lines) == (1, 9)
    assert (figures.functions, figures.function_lines) == (2, 5)


def test_the_recorder_counts_product_functions_without_background_work(
    tmp_path: Path,
) -> None:
    product = load(tmp_path / "product.py")
    recorder = Recorder(str(tmp_path), r":watch$", tmp_path, "router")

    recorder.change_phase("request")
    sys.setprofile(recorder.profile)
    product.serve()
    product.watch()
    sys.setprofile(None)
    recorder.change_phase("")

    calls = json.loads((tmp_path / "request.router").read_text())
    assert calls == [["product.py", "serve", 2, 2], ["product.py", "step", 5, 1]]
    assert (tmp_path / "request.router.started").exists()


def test_only_serving_processes_are_recorded() -> None:
    assert role_of(["python", "-m", "baton", "serve", "router", "--port", "1"]) == "router"
    assert role_of(["python", "-m", "baton", "up", "--prefill", "1"]) is None


def load(path: Path) -> ModuleType:
    path.write_text(
        "\ndef serve():\n    return step()\n\ndef step():\n    return 1\n\n"
        "def watch():\n    return step()\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
