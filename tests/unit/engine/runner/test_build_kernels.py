"""Concurrent builds of the kernel library."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from engine.runner.kernels import build
from engine.runner.kernels.build import Variant

NUM_NODES = 3
VARIANT = Variant("plain", frozenset(), ())


def test_nodes_that_start_together_run_the_compiler_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "c++"
    compiler.write_text(
        f'#!/bin/sh\necho run >> {log}\nfor last in "$@"; do :; done\n: > "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("BATON_KERNELS", raising=False)
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
    assert log.read_text().split() == ["run"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]
