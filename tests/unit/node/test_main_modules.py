"""`python -m` of the router and the nodes."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("package", "role"),
    [("router", "router"), ("prefill_node", "prefill"), ("decode_node", "decode")],
)
def test_a_package_run_as_a_program_names_the_command_to_use(package: str, role: str) -> None:
    with pytest.raises(SystemExit, match=f"baton serve {role}"):
        runpy.run_path(str(ROOT / package / "__main__.py"), run_name="__main__")
