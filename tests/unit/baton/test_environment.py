from __future__ import annotations

import os
import subprocess
import sys

import pytest

import baton


def test_idle_torch_threads_of_the_library_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)

    assert baton.LLM.__name__ == "LLM"

    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_a_wait_policy_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")

    assert baton.LLM.__name__ == "LLM"

    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


def test_the_process_that_starts_a_cluster_does_not_import_torch() -> None:
    code = "import sys, baton.cli.commands.up; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
