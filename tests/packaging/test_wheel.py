"""Wheel, built as by `make dist`, installed into an environment without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from baton.engine.runner.kernels.build import best_variant, compiler_path, cpu_features

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NOT_BUILT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*_pb2*", "__pycache__")
WHERE_THEY_ARE = """
import baton, baton.engine, baton.router
from baton.demo_model import demo_model
print(*baton.__path__, *baton.engine.__path__, *baton.router.__path__, demo_model(), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from an sdist of a copy of the checkout, without network."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=NOT_BUILT)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    # The kernels for this processor alone: they are in the cache, and the others take a minute.
    environment = {**os.environ, "BATON_WHEEL_KERNELS": best_variant(cpu_features()).name}
    built = subprocess.run(
        command,
        cwd=folder / "checkout",
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel that uses the dependencies of the test environment.

    The .pth files of the latter are not read, so that an editable install of Baton has no effect.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return folder


@pytest.fixture
def baton(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the installed command, to be run from another folder."""
    monkeypatch.chdir(tmp_path)
    return str(environment / "bin" / "baton")


def test_the_wheel_contains_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    folders = {name.partition("/")[0] for name in names}
    sources = {
        str(path.relative_to(ROOT))
        for folder in (ROOT / "baton", *(ROOT / "baton").iterdir())
        for path in folder.rglob("*")
        if path.suffix in {".c", ".cpp", ".css", ".h", ".py"} and "_pb2" not in path.name
    }

    assert {name for name in folders if not name.endswith(".dist-info")} == {"baton"}
    assert names >= sources
    assert names >= {"baton/v1/inference_pb2.py", "baton/v1/inference_pb2.pyi"}
    assert names >= {f"baton/models/demo/{path.name}" for path in (ROOT / "models/demo").iterdir()}


@pytest.mark.skipif(compiler_path() is None, reason="no compiler here")
@pytest.mark.usefixtures("baton")
def test_the_kernels_of_the_wheel_are_used_without_a_compiler(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BATON_KERNELS", raising=False)
    command = [str(environment / "bin" / "python"), "-m", "baton.engine.runner.kernels.build"]

    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    assert Path(found).is_relative_to(environment)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("baton")
def test_packages_and_demo_model_are_those_of_the_wheel(environment: Path) -> None:
    command = [str(environment / "bin" / "python"), "-c", WHERE_THEY_ARE]

    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()

    assert len(found) == 4
    assert all(Path(path).is_relative_to(environment) for path in found)


def test_the_installed_demo_hands_kv_over_and_exits(baton: str) -> None:
    ended = subprocess.run([baton, "demo"], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    assert "the decode node computed no" in ended.stdout
