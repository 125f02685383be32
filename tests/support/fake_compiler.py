"""C++ compiler that writes empty files."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.runner.kernels import build
from baton.engine.runner.kernels.build import SOURCES

NUM_SOURCES = len(list(SOURCES.glob("*.cpp")))
LARGEST = max(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size).name  # compiled first


class FakeCompiler:
    """Replaces the compiler and the folders of libraries for a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = "") -> None:
        """`script` is run before each output is written, with the arguments in `$*`."""
        self._log, self.packaged = folder / "log", folder / "packaged"
        compiler = folder / "c++"
        compiler.write_text(
            f'#!/bin/sh\necho run >> {self._log}\n{script}\nfor last in "$@"; do :; done\n'
            ': > "$last"\n'
        )
        compiler.chmod(0o755)
        monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
        monkeypatch.setattr(build, "PACKAGED", self.packaged)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        monkeypatch.delenv("BATON_KERNELS", raising=False)

    @property
    def num_runs(self) -> int:
        return self._log.read_text().count("run") if self._log.exists() else 0
