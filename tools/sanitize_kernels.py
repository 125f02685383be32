"""Run the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer.

Every kernel variant that this CPU supports is tested. An invalid access or undefined behaviour
ends the test process with a report.

    python -m tools.sanitize_kernels [PYTEST OPTION ...]   # or: make sanitize
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from baton.engine.runner.kernels.build import (
    VARIANTS,
    Variant,
    command_for,
    compiler_path,
    cpu_features,
    file_name,
)

SANITIZED = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so")
FOUND = "found"  # prefix of the report files, one per process
TESTS = (
    "tests/contract/test_block_copies.py",
    "tests/contract/test_encoder_ops.py",
    "tests/contract/test_int8_activations.py",
    "tests/contract/test_linear_attention.py",
    "tests/contract/test_low_rank_products.py",
    "tests/contract/test_runner_attention.py",
    "tests/contract/test_runner_experts.py",
    "tests/contract/test_runner_ops.py",
    "tests/contract/test_runner_sampler.py",
    "tests/contract/test_same_bits.py",
    "tests/golden/test_native_kernels.py",
)
TOO_LONG = "tokens_and_logprobs"  # takes minutes with sanitizers


def main(arguments: Sequence[str]) -> int:
    compiler = compiler_path()
    if compiler is None:
        print("No C++ compiler (c++, g++ or clang++) found: install one.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="baton-sanitized-") as folder:
        variants = [variant for variant in VARIANTS if variant.features <= cpu_features()]
        print(
            f"building {', '.join(variant.name for variant in variants)} with {compiler}",
            flush=True,
        )
        builds = [_start_build(compiler, variant, Path(folder)) for variant in variants]
        failures = [build for build in builds if build.wait()]
        if failures:
            return 1
        return _test(compiler, folder, arguments)


def _start_build(compiler: str, variant: Variant, folder: Path) -> subprocess.Popen[bytes]:
    target = folder / file_name(variant)
    return subprocess.Popen(command_for(compiler, variant, target, *SANITIZED))


def _test(compiler: str, folder: str, arguments: Sequence[str]) -> int:
    """Run the tests with preloaded sanitizer libraries.

    Leak detection is off, since Python itself does not free all memory.
    """
    environment = {
        **os.environ,
        "BATON_KERNELS": folder,
        "LD_PRELOAD": " ".join(_path_of(compiler, runtime) for runtime in RUNTIMES),
        "ASAN_OPTIONS": f"detect_leaks=0:log_path={folder}/{FOUND}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={folder}/{FOUND}",
    }
    chosen = [*TESTS, "-k", f"not {TOO_LONG}"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *chosen, *arguments]
    done = subprocess.run(command, env=environment, check=False)
    for found in sorted(Path(folder).glob(f"{FOUND}.*")):
        print(found.read_text(encoding="utf-8", errors="replace"), file=sys.stderr)
    return done.returncode


def _path_of(compiler: str, runtime: str) -> str:
    command = [compiler, f"-print-file-name={runtime}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
