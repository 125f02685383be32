"""`baton demo` from its start to its end."""

from __future__ import annotations

import re
import subprocess
import sys


def test_the_demo_hands_kv_over_and_ends_by_itself() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "baton", "demo"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    assert "What happened" in ended.stdout
    assert "the decode node computed no" in ended.stdout
    assert "kv_push" in ended.stdout
    assert re.search(r"UCX says that it wrote the KV over \S+/\S+", ended.stdout)
