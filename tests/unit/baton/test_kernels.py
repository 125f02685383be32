"""Build of missing kernels before a model is loaded."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.demo_model import demo_model
from baton.engine.runner.config import RunnerConfig
from baton.kernels import build_missing_kernels
from tests.support.fake_compiler import NUM_SOURCES, FakeCompiler


def shown(folder: Path, kernels: str = "auto", *, is_terminal: bool = False) -> str:
    """Return what is printed when the kernels for the model are built."""
    printed = io.StringIO()
    screen = Console(file=printed, force_terminal=is_terminal, width=100)
    build_missing_kernels(
        RunnerConfig(str(folder), kernels=kernels), SafetensorsFolder(folder), lambda: screen
    )
    return printed.getvalue()


def folder_of(tmp_path: Path, dtype: str) -> Path:
    """Return a model folder without weights."""
    config = json.loads((Path(demo_model()) / "config.json").read_text())
    config.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return tmp_path


def test_the_first_start_reports_the_kernel_build_and_the_second_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(tmp_path, monkeypatch)
    folder = folder_of(tmp_path, "bfloat16")

    assert shown(folder) == "building kernels for this CPU, once\n"
    assert shown(folder) == ""


def test_on_a_terminal_a_status_line_counts_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(tmp_path, monkeypatch)

    printed = shown(folder_of(tmp_path, "bfloat16"), is_terminal=True)

    assert f"of {NUM_SOURCES} files" in printed


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "auto"), ("bfloat16", "torch")])
def test_kernels_that_the_model_does_not_use_are_not_built(
    dtype: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)

    assert shown(folder_of(tmp_path, dtype), kernels) == ""
    assert compiler.num_runs == 0


def test_the_build_status_ignores_errors_of_model_and_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(tmp_path, monkeypatch, script="exit 1")

    assert shown(tmp_path) == ""
    assert "building kernels" in shown(folder_of(tmp_path, "bfloat16"))
