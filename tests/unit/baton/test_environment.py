from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

WARNING = "torch was imported before baton.LLM".replace(" ", "")
CREATE = "\ntry: LLM('no model')\nexcept Exception: pass"


def run(code: str, **environment: str) -> str:
    """Run a program; return its errors without spaces, with the settings that OpenMP shows."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    shown: Mapping[str, str] = {**kept, "OMP_DISPLAY_ENV": "VERBOSE", **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, check=True, stderr=subprocess.PIPE, text=True, env=shown
    ).stderr.replace(" ", "")


@pytest.mark.parametrize("statement", ["from baton import LLM", "from baton.llm import LLM"])
def test_idle_torch_threads_of_the_library_sleep(statement: str) -> None:
    errors = run(statement + CREATE)

    assert "GOMP_SPINCOUNT='0'" in errors
    assert WARNING not in errors


def test_torch_threads_that_spin_are_logged_once() -> None:
    errors = run(f"import torch\nfrom baton import LLM{CREATE * 2}")

    assert errors.count(WARNING) == 1


def test_a_wait_policy_of_the_user_is_kept_and_not_logged() -> None:
    errors = run(f"import torch\nfrom baton import LLM{CREATE}", OMP_WAIT_POLICY="ACTIVE")

    assert "OMP_WAIT_POLICY='ACTIVE'" in errors
    assert WARNING not in errors


def test_the_process_that_starts_a_cluster_does_not_import_torch() -> None:
    code = "import sys, baton.cli.commands.up; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
