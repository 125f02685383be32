"""Run Baton's tests and benchmarks on a GPU, and write one report to attach to an issue.

`make gpu` installs what it needs and runs this. Each check is a command with a time limit; one that
fails does not keep the others from running.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
MAX_SHOWN_LINES = 60  # the last ones of a command's output
PATIENCE_S = 20.0  # after Ctrl-C
ENVIRONMENT = {"TRITON_INTERPRET": "0", "COLUMNS": "160"}


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    command: Sequence[str]
    limit_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    check: Check
    status: str  # ok, failed with its exit code, or why it has none
    seconds: float
    output: str


def checks(device: str, model: str) -> list[Check]:
    """Return all checks, the quickest and most basic ones first."""
    python, on_device = sys.executable, ("--device", device)
    baton = (python, "-m", "baton")
    bench = ("--model", model, *on_device, "--kernels", "torch,triton", "--runs", "3")
    cluster = (*on_device, "--kernels", "triton", "--requests", "32", "--rates", "8")
    return [
        Check("GPU", ("nvidia-smi",), 60),
        Check("torch", (python, "-m", "torch.utils.collect_env"), 120),
        Check("doctor", (*baton, "doctor"), 120),
        Check("device", (python, "-m", "pytest", "-q", "-m", "gpu", "tests"), 600),
        Check("compiled kernels", (python, "-m", "tools.report_triton_kernels"), 1800),
        Check("greedy tokens", (python, "-m", "tools.compare_devices", *on_device), 900),
        Check("engine", (*baton, "bench", "engine", *bench), 1800),
        Check("limits on paper", (python, "-m", "tools.gpu_roofline"), 120),
        Check("gaps between passes", (python, "-m", "benchmarks", "scheduler"), 600),
        Check("1P1D", (*baton, "bench", "serve", "--model", model, *cluster), 900),
        Check(
            "1P1D, asynchronous",
            (*baton, "bench", "serve", "--model", model, *cluster, "--async-scheduling"),
            900,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(MODEL), help="for benchmarks")
    options = parser.parse_args()
    outcomes = []
    for check in checks(options.device, options.model):
        print(f"{check.name}: {' '.join(check.command)}", flush=True)
        outcomes.append(run(check))
        print(f"  {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
        # After each check, so that a crash of the machine leaves a report.
        options.output.write_text(report(outcomes), "utf-8")
    print(f"wrote {options.output}")
    sys.exit(any(outcome.status != "ok" for outcome in outcomes))


def run(check: Check) -> Outcome:
    """Run a check to its end, or to its time limit."""
    began_s = time.monotonic()
    try:
        process = subprocess.Popen(
            check.command,
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return Outcome(check, f"did not start: {error}", 0.0, "")
    try:
        output, _ = process.communicate(timeout=check.limit_s)
        code = process.returncode
        status = "ok" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        output, status = end(process), f"ended after {check.limit_s:.0f} s"
    return Outcome(check, status, time.monotonic() - began_s, output.decode(errors="replace"))


def end(process: subprocess.Popen[bytes]) -> bytes:
    """End a command and what it has started, as Ctrl-C does. Returns its output."""
    for signal_number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, signal_number)
        try:
            return process.communicate(timeout=PATIENCE_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return b""


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the report as Markdown."""
    rows = [f"| {each.check.name} | {each.status} | {each.seconds:.0f} |" for each in outcomes]
    parts = [
        "# Baton on a GPU",
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "\n".join(["| check | result | seconds |", "|---|---|---|", *rows]),
    ]
    for each in outcomes:
        lines = each.output.rstrip().splitlines()
        left_out = len(lines) - MAX_SHOWN_LINES
        more = [f"({left_out} lines are left out)"] if left_out > 0 else []
        text = "\n".join([*more, *lines[-MAX_SHOWN_LINES:]])
        command = " ".join(each.check.command)
        parts.append(f"## {each.check.name}\n\n`{command}`\n\n```\n{text}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
