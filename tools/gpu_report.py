"""Run Baton's tests and benchmarks on a GPU, and write one report to attach to an issue.

`make gpu` installs what it needs and runs this. Each check is a command with a time limit; one that
fails does not keep the others from running. vLLM is measured, too, if it is installed here or in
the environment that `--vllm-venv` names.
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
from importlib.util import find_spec
from pathlib import Path

MODEL = Path(__file__).resolve().parents[1] / "models" / "demo"
MAX_SHOWN_LINES = 60  # the last ones of a command's output
# Suites of kernels whose arguments are copied to the GPU, and back. Experts have addresses instead.
SUITES = tuple(
    f"tests/contract/test_{name}.py"
    for name in (
        "runner_ops",
        "runner_attention",
        "linear_attention",
        "runner_sampler",
        "triton_parts",
    )
)
ON_A_GPU = "triton and not experts"
PRINT_VLLM = "import vllm; print(vllm.__version__)"
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
    status: str  # ok, skipped, failed with its exit code, or why it has none
    seconds: float
    output: str

    @property
    def has_failed(self) -> bool:
        return self.status != "ok" and not self.status.startswith("skipped")


def checks(
    device: str, model: str, kernels: str = "triton", vllm_venv: Path | None = None
) -> list[Check]:
    """Return all checks, the quickest and most basic ones first."""
    python = sys.executable
    return [
        Check("GPU", ("nvidia-smi",), 60),
        Check("torch", (python, "-m", "torch.utils.collect_env"), 120),
        Check("doctor", (python, "-m", "baton", "doctor"), 120),
        *tests(device, kernels),
        *benchmarks(device, model, kernels),
        *comparisons(device, model, kernels, vllm_venv),
    ]


def tests(device: str, kernels: str) -> list[Check]:
    """Return the tests that need a GPU, by suite, and what is compiled and compared for it."""
    python = sys.executable
    pytest = (python, "-m", "pytest", "-q", "-m", "gpu")
    tokens = ("--device", device, "--kernels", names_of(kernels))
    return [
        Check("devices", (*pytest, "tests/contract/test_devices.py"), 600),
        Check("contract", (python, "-m", "pytest", "-q", "-k", ON_A_GPU, *SUITES), 3600),
        Check("compiled kernels", (python, "-m", "tools.report_triton_kernels"), 1800),
        Check("greedy tokens", (python, "-m", "tools.compare_devices", *tokens), 900),
        Check("golden", (*pytest, "tests/golden/test_triton_kernels.py"), 1800),
        Check("integration", (*pytest, "tests/integration/test_same_tokens.py"), 900),
    ]


def benchmarks(device: str, model: str, kernels: str) -> list[Check]:
    """Return the benchmarks of Baton alone, and the limits on paper."""
    python, on_device = sys.executable, ("--device", device)
    engine = (python, "-m", "benchmarks", "engine")
    bench_serve = (python, "-m", "baton", "bench", "serve")
    settings = ("--model", model, *on_device, "--kernels", names_of(kernels))
    serve = ("--model", model, *on_device, "--kernels", kernels, "--requests", "32", "--rates", "8")
    return [
        Check("engine", (*engine, *settings, "--runs", "3"), 1800),
        Check("limits on paper", (python, "-m", "tools.gpu_roofline"), 120),
        Check("gaps between launches", (python, "-m", "tools.gpu_launch_gaps", *settings), 600),
        Check("gaps between passes", (python, "-m", "benchmarks", "scheduler"), 600),
        Check("1P1D", (*bench_serve, *serve), 900),
        Check("1P1D, asynchronous", (*bench_serve, *serve, "--async-scheduling"), 900),
    ]


def comparisons(device: str, model: str, kernels: str, vllm_venv: Path | None) -> list[Check]:
    """Return the measurements that have a place for vLLM, which is left empty without it."""
    python = sys.executable
    settings = ("--model", model, "--device", device, "--kernels", kernels)
    venv = () if vllm_venv is None else ("--vllm-venv", str(vllm_venv))
    apart = () if vllm_venv is None else ("--vllm-apart", "shipped")
    colocated = ("--baton-steps", "", "--vllm-chunks", "")
    streams = (*settings, *colocated, *venv, *apart)
    return [
        Check("beside vLLM", (python, "-m", "tools.gpu_peers", *settings, *venv), 3600),
        Check("1P1D beside vLLM", (python, "-m", "benchmarks", "interference", *streams), 3600),
    ]


def names_of(kernels: str) -> str:
    """Return the kernels that are compared with each other."""
    return kernels if kernels == "torch" else f"torch,{kernels}"


def find_vllm(venv: Path | None) -> Path | None:
    """Return an environment with vLLM: the given one, or that of this process."""
    if venv is None and find_spec("vllm") is not None:
        return Path(sys.prefix)
    return venv


def vllm_outcome(venv: Path | None) -> Outcome:
    """Return the version of vLLM, or that there is none."""
    if venv is None:
        status = "skipped: not installed here, and no --vllm-venv is given"
        return Outcome(Check("vLLM", ()), status, 0.0, "")
    return run(Check("vLLM", (str(venv / "bin" / "python"), "-c", PRINT_VLLM), 300))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=str(MODEL), help="for benchmarks")
    parser.add_argument("--kernels", default="triton", help="torch, for a trial on a CPU")
    parser.add_argument("--vllm-venv", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--only", default="", help="checks whose name contains this")
    options = parser.parse_args()
    venv = find_vllm(options.vllm_venv)
    outcomes = [vllm_outcome(venv)]
    for check in checks(options.device, options.model, options.kernels, venv):
        if options.only not in check.name:
            continue
        print(f"{check.name}: {' '.join(check.command)}", flush=True)
        outcomes.append(run(check))
        print(f"  {outcomes[-1].status}, {outcomes[-1].seconds:.0f} s", flush=True)
        # After each check, so that a crash of the machine leaves a report.
        options.output.write_text(report(outcomes), "utf-8")
    options.output.write_text(report(outcomes), "utf-8")
    print(f"wrote {options.output}")
    sys.exit(any(outcome.has_failed for outcome in outcomes))


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
