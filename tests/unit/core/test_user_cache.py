from __future__ import annotations

from pathlib import Path

import pytest

from baton.core.user_cache import user_cache_folder
from baton.engine.runner.kernels.build import PACKAGED, build_folder
from baton.telemetry.options import default_trace_dir


@pytest.mark.parametrize("named", ["", "cache", "./cache"])
def test_a_cache_that_is_no_absolute_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", named)

    assert user_cache_folder() == tmp_path / ".cache" / "baton"


def test_a_user_without_a_home_has_traces_and_kernels_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under a user id of a container that no account has."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("BATON_KERNELS", raising=False)
    monkeypatch.setattr(Path, "home", no_home)

    assert user_cache_folder() is None
    assert default_trace_dir().name.startswith("baton-traces-")
    assert build_folder() == PACKAGED
