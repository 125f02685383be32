"""A measurement that is told to end takes with it what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

MODEL = Path(__file__).resolve().parents[2] / "models" / "demo"
TIMEOUT_S = 120.0


def test_a_peer_does_not_outlive_the_bench_that_is_told_to_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    os.mkfifo(told)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexec 3> {told}\necho $$ >&3\nexec sleep 1000\n")
    python.chmod(0o755)
    peer = ["--model", str(MODEL), "--vllm-venv", str(tmp_path)]

    bench = subprocess.Popen([sys.executable, "-m", "baton", "bench", "peer", *peer])
    with told.open() as heard:
        heard.readline()
        bench.send_signal(signal.SIGTERM)
        code = bench.wait(TIMEOUT_S)
        rest = heard.read()  # returns when whoever could write has ended

    assert code == 128 + signal.SIGTERM
    assert rest == ""
