"""Run property tests many times with random seeds, and print the seeds of the runs that fail.

Each run is a process of its own with new random examples, as few as in `make check`.

    python -m tools.repeat_properties tests/properties/test_tiers.py [--runs N] [PYTEST OPTION ...]

A run is repeated by BATON_HYPOTHESIS_PROFILE=random pytest FILE --hypothesis-seed=SEED.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Run property tests with random seeds.")
    parser.add_argument("--runs", type=int, default=200)
    options, of_pytest = parser.parse_known_args(arguments)
    failed: list[int] = []
    for run in range(options.runs):
        seed = secrets.randbits(32)
        ended = _run(of_pytest, seed)
        if ended.returncode:
            failed.append(seed)
            print(ended.stdout)
        print(f"run {run + 1}: seed {seed}: {'failed' if ended.returncode else 'ok'}", flush=True)
    print(f"{len(failed)} of {options.runs} runs failed; seeds: {failed}")
    return int(bool(failed))


def _run(arguments: Sequence[str], seed: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        [*command, f"--hypothesis-seed={seed}"],
        check=False,
        env=os.environ | {"BATON_HYPOTHESIS_PROFILE": "random"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
