"""Builds of the kernel library: progress, failures, and processes that start together."""

from __future__ import annotations

import _ctypes
import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Barrier

import pytest

from baton.engine.runner.kernels import build
from baton.engine.runner.kernels.build import WAITING, KernelsUnavailable, Variant
from tests.support.fake_compiler import LARGEST, NUM_SOURCES, FakeCompiler

NUM_NODES = 3
VARIANT = Variant("plain", frozenset(), ())


def test_nodes_that_start_together_run_the_compiler_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    all_missed_it = Barrier(NUM_NODES)
    find = build.built

    def built(variant: Variant) -> Path | None:
        path = find(variant)
        all_missed_it.wait()
        return path

    monkeypatch.setattr(build, "built", built)

    with ThreadPoolExecutor(NUM_NODES) as nodes:
        paths = set(nodes.map(build.library, [VARIANT] * NUM_NODES))

    (path,) = paths
    assert compiler.num_runs == NUM_SOURCES + 1  # one object for each source, and the library
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_build_reports_each_file_and_a_second_start_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    reported: list[str] = []

    build.library(VARIANT, reported.append)
    num_runs = compiler.num_runs
    build.library(VARIANT, reported.append)

    assert reported == [
        f"building kernels for this CPU, once: {number} of {NUM_SOURCES} files"
        for number in range(NUM_SOURCES + 1)
    ]
    assert compiler.num_runs == num_runs


def test_a_process_reports_that_it_waits_for_the_build_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCompiler(tmp_path, monkeypatch)
    folder = build.build_folder()
    folder.mkdir(parents=True)
    reported: SimpleQueue[str] = SimpleQueue()
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    with ThreadPoolExecutor(1) as node:
        path = node.submit(build.library, VARIANT, reported.put)
        try:
            assert reported.get() == WAITING
            (folder / build.file_name(VARIANT)).touch()
        finally:
            os.close(other)

    assert path.result().parent == folder
    assert reported.empty()


def test_a_failure_terminates_the_other_compilers_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)
    script = f'case "$*" in *{LARGEST}*) echo no memory >&2; exit 1;; *) cat {never};; esac'
    FakeCompiler(tmp_path, monkeypatch, script)

    with pytest.raises(KernelsUnavailable, match="cannot build the kernels: no memory"):
        build.library(VARIANT)

    assert list(build.build_folder().iterdir()) == []


def test_the_library_of_a_wheel_is_used_if_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    compiler.packaged.mkdir()
    packaged = compiler.packaged / build.file_name(VARIANT)
    shutil.copy(_ctypes.__file__, packaged)

    assert build.library(VARIANT) == packaged
    assert compiler.num_runs == 0


def test_kernels_are_built_if_the_library_of_the_wheel_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = FakeCompiler(tmp_path, monkeypatch)
    compiler.packaged.mkdir()
    (compiler.packaged / build.file_name(VARIANT)).write_text("for another system")

    assert build.library(VARIANT).parent == build.build_folder()
    assert "The wheel's kernels cannot be used on this machine" in caplog.text
